"""W&B: modes, what is sent, resumes, and servers that die or never answer."""

import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest

from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics
from ffnlab.record.wandb import WandbSink, bins, logged_in

HERE = Path(__file__).parent
KEY = "a" * 40


def sink(mode: str = "offline", **options) -> WandbSink:
    plain = {
        "project": "p",
        "entity": None,
        "group": "g",
        "tags": ["t"],
        "job_type": "j",
        "finish_timeout": 5.0,
        "artifact": False,
    }
    return WandbSink(mode=mode, **(plain | options))


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user who has never heard of W&B."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return monkeypatch


def test_auto_is_online_only_with_a_key(tmp_path: Path, nobody: pytest.MonkeyPatch):
    assert sink("auto").mode == "offline"
    with pytest.raises(UserError, match=r"mode=online needs a W&B key.*wandb login"):
        sink("online")
    nobody.setenv("WANDB_API_KEY", KEY)
    assert sink("auto").mode == "online"
    assert sink("online").mode == "online"
    nobody.setenv("WANDB_MODE", "disabled")
    assert sink("auto").mode == "disabled"
    nobody.setenv("WANDB_MODE", "dryrun")
    assert sink("auto").mode == "offline"


def test_a_run_without_a_key_says_how_to_send_it_later(tmp_path: Path, nobody, capsys):
    for key, hint in ((None, "`wandb login`, then `ffnlab sync"), (KEY, "wandb; `ffnlab sync")):
        if key:
            nobody.setenv("WANDB_API_KEY", key)
        tracker = sink("auto" if key is None else "offline")
        tracker.start({"id": "abcd1234", "name": "r", "path": tmp_path}, {})
        tracker.finish("done", {})
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"W&B: offline, in {tmp_path}/wandb; ")
        assert hint in line
        assert line.endswith(f"`ffnlab sync {tmp_path}` sends it")


def test_a_key_in_netrc_counts_for_its_server(tmp_path: Path, nobody: pytest.MonkeyPatch):
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine github.com\n  login me\n  password {KEY}\n")
    assert not logged_in()
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert logged_in()
    nobody.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert not logged_in()
    netrc.write_text(f"machine wandb.example.org:8080\n  login user\n  password {KEY}\n")
    assert logged_in()
    nobody.delenv("WANDB_BASE_URL")
    assert not logged_in()
    (tmp_path / "home" / "settings").write_text("[default]\nbase_url = https://wandb.example.org:8080\n")
    assert logged_in()
    netrc.write_text("machine {{{")
    assert not logged_in()


def test_options_are_checked():
    with pytest.raises(UserError, match=r"unknown logger.mode 'onlin'"):
        sink("onlin")
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="finish_timeout must be a positive number"):
            sink(finish_timeout=bad)


def test_an_offline_run_read_back(tmp_path: Path, wandb_records, wandb_rows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SECRET", "planted-secret-value")
    picture = tmp_path / "f.png"
    picture.write_bytes(_png())
    tracker = sink()
    tracker.start({"id": "abcd1234", "name": "my run", "path": tmp_path}, {"optim": {"lr": 0.02}, "seed": 3})
    for step in range(5):
        loss = float("nan") if step == 3 else np.float32(2.0 - step)
        tracker.log(
            {"step": step, "tokens": 10 * step, "train/loss": loss, "val/loss": 3.0 - step, "gone": None}
        )
    tracker.histograms(4, {"probe/active": (np.arange(4), np.array([-np.inf, 0.25, 0.5, 0.75, np.inf]))})
    tracker.image("figures/curve", picture, 4)
    active = {f"probe/activity/L0{i}/active_frac": 0.25 * i for i in range(3)}
    tracker.finish("done", {"val/loss": float("inf"), "n": np.int64(7), **active})

    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abcd1234")
    rows = wandb_rows(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["train/loss"] for row in rows][:3] == [2.0, 1.0, 0.0]
    assert math.isnan(rows[3]["train/loss"])
    assert "gone" not in rows[0]
    assert rows[4]["probe/active/values"] == [0, 1, 2, 3]
    assert rows[4]["probe/active/bins"] == [0, 0.25, 0.5, 0.75, 1]
    (file,) = folder.glob("*.wandb")
    records = wandb_records(file)
    (start,) = [record.run for record in records if record.HasField("run")]
    shared = (start.project, start.run_group, list(start.tags), start.job_type)
    assert (*shared, start.display_name) == ("p", "g", ["t"], "j", "my run")
    assert start.host == ""
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert (config["optim"], config["seed"]) == ({"lr": 0.02}, 3)
    axes = {
        record.metric.glob_name or record.metric.name: record.metric
        for record in records
        if record.HasField("metric")
    }
    assert axes["*"].step_metric == "step"
    assert axes["val/loss"].summary.min
    summary = {item.key: item.value_json for record in records for item in record.summary.update if item.key}
    assert (summary["status"], summary["n"], summary["val/loss"]) == ('"done"', "7", "Infinity")
    assert float(summary["probe/activity/active_frac"]) == 0.25  # the mean over layers
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not [path for path in files if b"planted-secret" in path.read_bytes()]
    assert not [
        path for path in files if path.name in ("wandb-metadata.json", "requirements.txt", "output.log")
    ]


def test_a_resumed_offline_run_is_whole_in_its_newest_folder(tmp_path: Path, wandb_rows, wandb_records):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    first = sink()
    first.start({"id": "same", "name": "n", "path": tmp_path, "resumed": False}, {"a": 1})
    for step in range(8):
        row = {"step": step, "train/loss": float("nan") if step == 2 else step / 8}
        metrics.append(row)
        first.log(row)
    first.finish("interrupted", {})
    metrics.truncate(5)
    second = sink()
    second.start({"id": "same", "name": "n", "path": tmp_path, "resumed": True}, {"a": 1})
    for step in range(6, 10):
        second.log({"step": step, "train/loss": step / 8})
    second.finish("done", {})
    old, new = sorted(
        (tmp_path / "wandb").glob("offline-run-*-same*"), key=lambda path: path.stat().st_mtime_ns
    )
    assert len(wandb_rows(old)) == 8
    rows = wandb_rows(new)
    assert [row["_step"] for row in rows] == list(range(10))
    assert math.isnan(rows.pop(2)["train/loss"])
    assert [row["train/loss"] for row in rows] == [step / 8 for step in range(10) if step != 2]
    (file,) = old.glob("*.wandb")
    assert [record.exit.exit_code for record in wandb_records(file) if record.HasField("exit")] == [1]


def test_two_runs_of_one_process_do_not_merge(tmp_path: Path, wandb_rows):
    trackers = [sink(), sink()]
    for number, tracker in enumerate(trackers):
        (tmp_path / str(number)).mkdir()
        tracker.start({"id": f"run{number}", "name": "n", "path": tmp_path / str(number)}, {})
    for number, tracker in enumerate(trackers):
        tracker.log({"step": 0, "x": number})
        tracker.finish("done", {})
        (folder,) = (tmp_path / str(number) / "wandb").glob("offline-run-*")
        assert [row["x"] for row in wandb_rows(folder)] == [number]


def test_disabled_makes_nothing(tmp_path: Path):
    tracker = sink("disabled")
    tracker.start({"id": "x", "name": "n", "path": tmp_path}, {})
    tracker.log({"step": 0})
    tracker.histograms(0, {"h": (np.arange(2), np.arange(3))})
    tracker.image("i", tmp_path / "none.png", 0)
    tracker.finish("done", {})
    assert list(tmp_path.iterdir()) == []


def test_bins_are_what_wandb_takes():
    counts, edges = bins(np.arange(1500), np.concatenate([[-np.inf], np.arange(1499.0), [np.inf]]))
    assert len(counts) <= 512
    assert len(edges) == len(counts) + 1
    assert counts.sum() == sum(range(1500))
    assert np.isfinite(edges).all()
    assert (np.diff(edges) > 0).all()
    counts, edges = bins(np.array([1]), np.array([-np.inf, np.inf]))
    assert np.isfinite(edges).all()


def test_a_server_that_dies_in_the_middle(tmp_path: Path, start, wandb_rows):
    server = start(HERE / "wandb_server.py")
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    (tmp_path / "home").mkdir()
    env = {
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": KEY,
        "WANDB_MODE": "online",
        "HOME": str(tmp_path / "home"),
    }
    child = start(HERE / "online_run.py", tmp_path, server.pid, **env)
    out, err = child.communicate(timeout=90)
    assert child.returncode == 0, err
    assert server.wait(5) == -9
    lines = out.splitlines()
    assert lines[:2] == ["mode online", "mode online"]
    assert float(lines[2].split()[1]) < 20
    assert "Traceback" not in err
    (folder,) = (tmp_path / "wandb").glob("run-*-abc")
    assert [row["step"] for row in wandb_rows(folder)] == list(range(500))  # on the disk, for `wandb sync`


def test_a_server_that_never_answers_gives_an_offline_run(tmp_path: Path, start, wandb_rows):
    code = """
import sys
from ffnlab.record import wandb
from ffnlab.record.sinks import Sinks
wandb._INIT_S = 1.0
plain = {"project": "p", "entity": None, "group": None, "tags": [], "job_type": None}
plain |= {"finish_timeout": 1, "artifact": False}
sink = wandb.WandbSink(mode="auto", **plain)
sinks = Sinks([sink])
sinks.start({"id": "abc", "name": "n", "path": sys.argv[1]}, {})
sinks.log({"step": 0, "x": 1})
sinks.finish("done", {})
print(sink.mode)
"""
    (tmp_path / "home").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": KEY,
            "WANDB_MODE": "online",
            "HOME": str(tmp_path / "home"),
        }
        out, err = start(code, tmp_path, **env).communicate(timeout=60)
    assert out == "offline\n", err
    assert err.count("UserWarning") == err.count("W&B cannot be reached") == 1
    assert "Traceback" not in err
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-abc")
    assert [row["x"] for row in wandb_rows(folder)] == [1]


def _png() -> bytes:
    """A red pixel."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_a_record_with_a_link_does_not_go_along(tmp_path: Path, wandb_records):
    (tmp_path / "private").write_text("private")
    (tmp_path / "neurons.zarr").mkdir()
    (tmp_path / "neurons.zarr/c").symlink_to(tmp_path / "private")
    tracker = sink(artifact=True)
    tracker.start({"id": "abcd1234", "name": "r", "path": tmp_path}, {})
    with pytest.raises(UserError, match="c is a link"):
        tracker.finish("done", {})
    tracker._run.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(file)
    assert not [r for r in records if r.artifact.name or r.request.log_artifact.artifact.name]
    assert b"private" not in b"".join(f.read_bytes() for f in (tmp_path / "wandb").rglob("*") if f.is_file())


def test_neurons_go_along_when_asked(tmp_path: Path, wandb_records, wandb_rows):
    (tmp_path / "neurons.zarr").mkdir()
    (tmp_path / "neurons.zarr/zarr.json").write_text("{}")
    tracker = sink(artifact=True)
    tracker.start({"id": "abcd1234", "name": "r", "path": tmp_path}, {})
    tracker.finish("done", {})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert wandb_rows(file.parent) == []  # waits until W&B has written all
    artifacts = [record.request.log_artifact.artifact for record in wandb_records(file)]
    sent = [a for a in artifacts if a.name] + [r.artifact for r in wandb_records(file) if r.artifact.name]
    assert [(a.name, a.type) for a in sent] == [("neurons-abcd1234", "neurons")]
