"""The run directory: names, config, state, lock, and disks that refuse."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from ffnlab.errors import UserError
from ffnlab.record.rundir import RunDir, differences, load_config, new_name, write_atomic

CONFIG = {"seed": 0, "out": None, "train": {"steps": 10, "clip": 1.0}, "optim": {"lr": 0.02}, "stream": []}
IGNORE = {"out", "logger"}


def enter(path: Path, config: dict = CONFIG, grow: bool = False) -> RunDir:
    return RunDir.open(path, config, ignore=IGNORE, steps_may_grow=grow)


def test_names_of_the_same_second_differ():
    names = {new_name("swiglu", "relu2", 0) for _ in range(20)}
    assert len(names) > 15
    assert all(re.fullmatch(r"swiglu-relu2-s0-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)
    assert "/" not in new_name("../../evil", "relu2", 0)


def test_differences_name_the_key_and_both_values():
    new = {
        "seed": 0,
        "out": "x",
        "train": {"steps": 10, "clip": 1},
        "optim": {"lr": 0.01, "beta": 0.9},
        "stream": ["a"],
    }
    assert differences(CONFIG, new, IGNORE) == [
        "optim.beta: absent there, 0.9 here",
        "optim.lr: 0.02 there, 0.01 here",
        "stream: [] there, ['a'] here",
    ]
    assert differences({"a": math.nan}, {"a": math.nan}, set()) == []
    assert differences({"a": True}, {"a": 1}, set()) == ["a: true there, 1 here"]
    assert differences({"logger": {"mode": 1}}, {"logger": {"mode": 2}}, IGNORE) == []


def test_new_then_resume_then_done(tmp_path: Path):
    path = tmp_path / "deep" / "run"
    run = enter(path)
    assert run.state == "new"
    assert load_config(path) == CONFIG
    first = run.info()
    assert first["status"] == "running"
    assert first["name"] == "run"
    run.close()
    run = enter(path, {**CONFIG, "out": "elsewhere", "logger": {"mode": "online"}})
    assert run.state == "resume"
    assert run.info()["id"] == first["id"]
    run.update(loss=torch.tensor(2.5), worst=math.inf, nested={"a": [math.nan]}, place=Path("x"))
    run.set_status("done")
    run.close()
    info = json.loads((path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (info["loss"], info["worst"], info["nested"], info["place"]) == (2.5, "inf", {"a": ["nan"]}, "x")
    done = enter(path)
    assert done.state == "done"
    assert not (path / "lock").exists()
    with pytest.raises(ValueError, match="none of running"):
        done.set_status("finished")


def test_diverged_is_done_interrupted_and_failed_resume(tmp_path: Path):
    for status, state in {
        "diverged": "done",
        "interrupted": "resume",
        "failed": "resume",
        "running": "resume",
    }.items():
        run = enter(tmp_path / status)
        run.set_status(status)
        run.close()
        again = enter(tmp_path / status)
        assert again.state == state
        again.close()


def test_steps_grow_only_when_allowed(tmp_path: Path):
    more = {**CONFIG, "train": {"steps": 20, "clip": 1.0}}
    run = enter(tmp_path / "r")
    run.set_status("done")
    run.close()
    with pytest.raises(UserError, match=r"train.steps: 10 there, 20 here"):
        enter(tmp_path / "r", more)
    run = enter(tmp_path / "r", more, grow=True)
    assert run.state == "resume"
    assert load_config(tmp_path / "r")["train"]["steps"] == 20
    run.close()
    with pytest.raises(UserError, match=r"train.steps: 20 there, 10 here"):
        enter(tmp_path / "r", CONFIG, grow=True)


def test_another_config_changes_nothing(tmp_path: Path):
    enter(tmp_path / "r").close()
    before = {file: file.read_bytes() for file in (tmp_path / "r").iterdir()}
    with pytest.raises(UserError) as caught:
        enter(tmp_path / "r", {**CONFIG, "seed": 1, "optim": {"lr": 0.1}})
    (problem,) = caught.value.problems
    assert problem.splitlines()[1:] == ["    optim.lr: 0.02 there, 0.1 here", "    seed: 0 there, 1 here"]
    assert {file: file.read_bytes() for file in (tmp_path / "r").iterdir()} == before


def test_a_file_and_a_headless_run_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        enter(tmp_path / "file")
    with pytest.raises(UserError, match="Not a directory"):
        enter(tmp_path / "file" / "below")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"holds metrics.jsonl but no config.yaml"):
        enter(tmp_path / "old")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: ${oc.env:HOME}", "holds '\\${'"),
        ("a: [1, '${x}']", "holds '\\${'"),
        ("a: !!python/object/apply:os.system ['touch evil']", "not plain YAML"),
        ("a: [", "not plain YAML, from line 1 on"),
        ("- 1", "holds no keys"),
    ],
)
def test_a_foreign_config_is_data(tmp_path: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        load_config(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_config_comes_back_as_it_was(tmp_path: Path):
    config = {
        "a": 1e-5,
        "b": 1e300,
        "c": "yes",
        "d": "1e-3",
        "e": None,
        "f": (1, 2),
        "g": {},
        "h": "ü: #x",
        "i": 0.1,
    }
    enter(tmp_path, config).close()
    assert load_config(tmp_path) == {**config, "f": [1, 2]}
    assert enter(tmp_path, config).state == "resume"


HOLD = """
import sys
from pathlib import Path
from ffnlab.record.rundir import RunDir
try:
    run = RunDir.open(Path(sys.argv[1]), {"seed": 0}, ignore=set(), steps_may_grow=False)
    print(run.state, flush=True)
    sys.stdin.readline()
except Exception as error:
    print(error, flush=True)
"""


def test_second_process_is_refused_and_a_dead_one_replaced(tmp_path: Path, start):
    first = start(HOLD, tmp_path / "r")
    assert first.stdout.readline() == "new\n"
    second = start(HOLD, tmp_path / "r")
    message = second.stdout.readline()
    assert f"process {first.pid} on {socket.gethostname()}" in message
    first.kill()
    first.wait()
    assert (tmp_path / "r" / "lock").exists()
    third = start(HOLD, tmp_path / "r")
    assert third.stdout.readline() == "resume\n"
    third.communicate("\n")
    assert not (tmp_path / "r" / "lock").exists()


def test_of_many_that_start_at_once_one_gets_the_directory(tmp_path: Path, start):
    children = [start(HOLD, tmp_path / "r") for _ in range(4)]
    lines = [child.stdout.readline() for child in children]
    assert sum(line == "new\n" for line in lines) == 1
    assert sum("is in use by process" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("owner", "held"),
    [
        ({}, True),
        ({"start": 1}, False),  # our pid, but another process: recycled
        ({"boot": "another"}, False),
        ({"host": "elsewhere", "start": 1}, True),  # nothing can be known of it
        ({"pid": -1}, False),
        ({"pid": "x"}, False),
    ],
)
def test_whose_lock_counts(tmp_path: Path, owner: dict, held: bool):
    run = enter(tmp_path / "r")
    lock = tmp_path / "r" / "lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | owner))
    if held:
        with pytest.raises(UserError, match="is in use by process"):
            enter(tmp_path / "r")
    else:
        again = enter(tmp_path / "r")
        assert again.state == "resume"
        run.close()  # the old owner comes back to life: it must not free what is no longer its own
        assert lock.exists()
        again.close()


def test_a_torn_lock_is_taken_over(tmp_path: Path):
    enter(tmp_path / "r").close()
    (tmp_path / "r" / "lock").write_text('{"pid": 12')
    assert enter(tmp_path / "r").state == "resume"


def test_a_forked_child_does_not_free_the_lock(tmp_path: Path):
    run = enter(tmp_path / "r")
    child = os.fork()
    if child == 0:
        run.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "r" / "lock").exists()


def test_write_atomic_replaces_or_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_atomic(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"a: the disk is full: 3 bytes to write"):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_kill_right_before_the_rename_leaves_the_old(tmp_path: Path):
    write_atomic(tmp_path / "a", "old")
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                write_atomic(tmp_path / "a", "new")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_or_read_only_disk_leaves_nothing(disk, tmp_path: Path):
    small = disk("size=64k")
    (small / "filler").write_bytes(b"x" * (64 * 1024 - 4096 * 3))
    with pytest.raises(UserError, match="the disk is full"):
        enter(small / "a" / "b", {"text": "x" * 50_000})
    assert [file.name for file in small.iterdir()] == ["filler"]
    done = enter(disk("size=64k", name="ro") / "r")
    done.set_status("done")
    done.close()
    disk("remount,ro", name="ro")
    assert enter(tmp_path / "ro" / "r").state == "done"
    with pytest.raises(UserError, match="Read-only file system"):
        enter(tmp_path / "ro" / "other")


def test_yaml_is_plain(tmp_path: Path):
    enter(tmp_path / "r").close()
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text()) == CONFIG


def test_what_a_killed_writer_left_is_removed(tmp_path: Path):
    """But not what a living process is writing now."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
    dead = tmp_path / f".tokens.json.{int(gone.stdout)}.tmp"
    alive = tmp_path / f".sparsify.csv.{os.getpid()}.tmp"
    for path in (dead, alive):
        path.write_text("half")
    enter(tmp_path).close()
    assert (dead.exists(), alive.exists()) == (False, True)
