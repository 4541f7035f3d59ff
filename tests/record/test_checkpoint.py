"""Checkpoints: exact, whole or absent, and never at the cost of the one before."""

import errno
import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.record import checkpoint, files
from ffnlab.record.checkpoint import CheckpointSettings, load, newest_complete, resumable, save, save_weights
from ffnlab.record.tensors import load_weights, pack


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b and type(a) is type(b)


def test_comes_back_to_the_bit(tmp_path: Path, state):
    model, trainer = state
    model |= {
        "half": torch.randn(3, 5).bfloat16(),
        "ids": torch.arange(4),
        "c": torch.tensor(-0.5),
        "none": torch.empty(0),
    }
    path = save(tmp_path, 500, model, trainer, keep_last=2)
    assert path == tmp_path / "checkpoints" / "step-000500"
    assert newest_complete(tmp_path) == path
    tensors, back = load(path)
    assert same(tensors, model)
    assert same(back, trainer)


def test_shared_tensors_are_stored_once(tmp_path: Path, state):
    model, trainer = state
    path = save(tmp_path, 1, model, trainer, keep_last=None)
    size = (path / "model.safetensors").stat().st_size
    assert size < 4 * (64 * 32 + 128 * 32) + 1000
    tensors, _ = load(path)
    assert tensors["head.weight"] is tensors["embed.weight"]


def test_equal_weights_are_equal_files(state):
    """In whatever order the library happens to put the metadata."""
    files = {pack(state[0], 1) for _ in range(20)}
    assert len(files) == 1


def test_views_and_transposes_keep_their_values(tmp_path: Path):
    base = torch.randn(6, 4)
    model = {"rows": base[:2], "more": base[1:3], "turned": base.t(), "base": base}
    tensors, _ = load(save(tmp_path, 1, model, {}, keep_last=1))
    assert same(tensors, model)


def test_a_tied_parameter_of_a_module_loads_strictly(tmp_path: Path):
    def tied():
        module = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(7, 3), "head": torch.nn.Linear(3, 7, bias=False)}
        )
        module["head"].weight = module["embed"].weight
        return module

    one, two = tied(), tied()
    tensors, _ = load(save(tmp_path, 1, one.state_dict(), {}, keep_last=1))
    two.load_state_dict(tensors, strict=True)
    assert torch.equal(one["head"].weight, two["embed"].weight)


def test_keep_last_deletes_only_what_this_run_wrote(tmp_path: Path, state):
    (tmp_path / "run.json").write_text('{"id": "mine"}')
    folder = tmp_path / "checkpoints"
    save(tmp_path / "other", 1, *state, keep_last=2)
    for step in (100, 200):
        save(tmp_path, step, *state, keep_last=2)
    shutil.copytree(
        tmp_path / "other" / "checkpoints" / "step-000001", folder / "step-000001"
    )  # of another run
    shutil.copytree(folder / "step-000100", folder / "step-000100-best")
    (folder / "step-000050").mkdir()
    (folder / "step-000050" / "precious.txt").write_text("")
    save_weights(tmp_path, 100, state[0])
    for step in (300, 400, 500):
        save(tmp_path, step, *state, keep_last=2)
    kept = [
        "step-000001",
        "step-000050",
        "step-000100-best",
        "step-000400",
        "step-000500",
        "weights-000100.safetensors",
    ]
    assert names(tmp_path) == kept
    save(tmp_path, 600, *state, keep_last=1)
    assert [name for name in names(tmp_path) if name in ("step-000400", "step-000500", "step-000600")] == [
        "step-000600"
    ]


def test_keep_last_more_than_there_are(tmp_path: Path, state):
    for step in (1, 2, 3):
        save(tmp_path, step, *state, keep_last=5)
    save(tmp_path, 4, *state, keep_last=None)
    assert len(names(tmp_path)) == 4


def test_deleting_that_fails_does_not_fail_the_save(tmp_path: Path, state, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1, *state, keep_last=1)
    real = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == "manifest.json":
            raise PermissionError(13, "Permission denied")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert save(tmp_path, 2, *state, keep_last=1).exists()


def test_the_same_step_again_replaces_it(tmp_path: Path, state):
    model, trainer = state
    save(tmp_path, 7, model, trainer, keep_last=2)
    path = save(tmp_path, 7, {"a": torch.ones(2)}, trainer, keep_last=2)
    assert same(load(path)[0], {"a": torch.ones(2)})
    assert names(tmp_path) == ["step-000007"]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped byte of the model": lambda path: flip(path / "model.safetensors"),
    "flipped byte of the trainer": lambda path: flip(path / "trainer.pt"),
    "truncated model": lambda path: os.truncate(path / "model.safetensors", 1000),
    "empty trainer": lambda path: os.truncate(path / "trainer.pt", 0),
    "no model": lambda path: (path / "model.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "manifest is a list": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest names another file": lambda path: manifest(path, files={"../../x": {"bytes": 0, "sha256": ""}}),
    "manifest of another step": lambda path: manifest(path, step=1),
    "step is text": lambda path: manifest(path, step="2"),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def manifest(path: Path, **fields: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_one_falls_back_with_one_warning(tmp_path: Path, state, damage: str):
    save(tmp_path, 1, *state, keep_last=2)
    good = save(tmp_path, 2, *state, keep_last=2).with_name("step-000001")
    broken = good.with_name("step-000002")
    DAMAGE[damage](broken)
    with pytest.warns(UserWarning, match="step-000002 is broken") as caught:
        assert newest_complete(tmp_path) == good
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_complete(tmp_path) == good
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load(broken)
    load(save(tmp_path, 2, *state, keep_last=2))  # the run comes by again


def test_none_at_all(tmp_path: Path, state):
    assert newest_complete(tmp_path) is None
    shutil.rmtree(save(tmp_path, 1, *state, keep_last=1) / "model.safetensors", ignore_errors=True)
    (tmp_path / "checkpoints" / "step-000001" / "trainer.pt").unlink()
    with pytest.warns(UserWarning, match="broken"):
        assert newest_complete(tmp_path) is None


def total_bytes(root: Path, state) -> int:
    path = save(root, 1, *state, keep_last=1)
    return sum(file.stat().st_size for file in path.iterdir())


def points(size: int, n: int) -> list[int]:
    """n random bytes of a save."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:n].tolist()


def failing(at: int, how: Callable[[], None]) -> Callable:
    """HashedFile.write that writes up to byte `at` of the whole save, then calls `how`."""
    real, done = files.HashedFile.write, 0

    def write(self, data) -> int:
        nonlocal done
        view = memoryview(data).cast("B")
        if done + len(view) > at:
            self._file.write(view[: at - done])
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            how()
            raise self.error
        done += len(view)
        return real(self, data)

    return write


def test_a_disk_that_fills_at_any_byte(tmp_path: Path, state, monkeypatch: pytest.MonkeyPatch):
    size = total_bytes(tmp_path / "measure", state)
    before = save(tmp_path, 1, *state, keep_last=1)
    for at in points(size, 50):
        monkeypatch.setattr(files.HashedFile, "write", failing(at, lambda: None))
        with pytest.raises(UserError, match=r"step-000002: the disk is full: [\d,]+ bytes"):
            save(tmp_path, 2, *state, keep_last=1)
        monkeypatch.undo()
        assert names(tmp_path) == ["step-000001"]
    assert same(load(before)[0], state[0])


def test_a_kill_at_any_byte(tmp_path: Path, state):
    size = total_bytes(tmp_path / "measure", state)
    save(tmp_path, 1, *state, keep_last=1)
    for at in (*points(size, 50), 0, size - 1):
        child = os.fork()
        if child == 0:
            files.HashedFile.write = failing(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(tmp_path, 2, *state, keep_last=1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert newest_complete(tmp_path) == tmp_path / "checkpoints" / "step-000001"
    assert same(load(tmp_path / "checkpoints" / "step-000001")[0], state[0])
    save(tmp_path, 2, *state, keep_last=1)
    assert names(tmp_path) == ["step-000002"]  # and nothing of the killed saves


def test_a_kill_while_the_same_step_is_replaced(tmp_path: Path, state, monkeypatch: pytest.MonkeyPatch):
    """Between the two renames the step has no folder of its name: the old one takes it again."""
    path = save(tmp_path, 1, *state, keep_last=1)
    child = os.fork()
    if child == 0:
        real = Path.rename

        def rename(source: Path, target: Path) -> Path:
            moved = real(source, target)
            os.kill(os.getpid(), signal.SIGKILL)
            return moved

        monkeypatch.setattr(Path, "rename", rename)
        save(tmp_path, 1, *state, keep_last=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert newest_complete(tmp_path) is None
    assert resumable(tmp_path) == newest_complete(tmp_path) == path
    save(tmp_path, 2, *state, keep_last=1)
    assert names(tmp_path) == ["step-000002"]


def test_a_kill_at_a_random_moment(tmp_path: Path, state):
    """A child saves steps 1, 2, 3, ... without a pause: killed, it leaves something whole to go on from."""
    for wait in (0.01, 0.03, 0.05, 0.08):
        child = os.fork()
        if child == 0:
            for step in range(1, 10**6):
                save(tmp_path, step, *state, keep_last=1)
        while not list((tmp_path / "checkpoints").glob("step-*")):
            time.sleep(0.001)
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = newest_complete(tmp_path)
        assert path is not None
        assert same(load(path)[1], state[1])


def test_full_disk(disk, state):
    model, trainer = state
    root = disk("size=2m")
    first = save(root, 1, model, trainer, keep_last=1)
    message = r"step-000002: the disk is full: 2,120,000 bytes to write, [12],[\d,]+ bytes free"
    with pytest.raises(UserError, match=message):
        save(
            root, 2, {"w": torch.zeros(520_000)}, {"m": torch.zeros(10_000)}, keep_last=1
        )  # seen before writing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "free_bytes", lambda folder: 10**12)  # filled by somebody else on the way
        for weights, moments in ((600_000, 10), (250_000, 350_000)):  # in the model, in the trainer
            with pytest.raises(UserError, match=r"step-000002: the disk is full"):
                save(root, 2, {"w": torch.zeros(weights)}, {"m": torch.zeros(moments)}, keep_last=1)
    assert names(root) == ["step-000001"]
    assert same(load(first)[0], model)
    with pytest.raises(UserError, match=r"weights-000002.safetensors: the disk is full"):
        save_weights(root, 2, {"w": torch.zeros(600_000)})
    assert names(root) == ["step-000001"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_weights_do_not_push_out_the_last_good_ones(tmp_path: Path, state, bad: float):
    model, trainer = state
    save(tmp_path, 1, model, trainer, keep_last=1)
    model["embed.weight"][0, 0] = bad
    with pytest.raises(FloatingPointError, match=r"NaN or inf in embed.weight, head.weight \(2 tensors\)"):
        save(tmp_path, 2, model, trainer, keep_last=1)
    assert names(tmp_path) == ["step-000001"]


def test_weights_alone(tmp_path: Path, state):
    path = save_weights(tmp_path, 20, state[0])
    assert same(load_weights(path), state[0])
    assert newest_complete(tmp_path) is None
    path.write_bytes(b"\x08\0\0\0\0\0\0\0[1, 2, 3]")
    with pytest.raises(UserError, match="not a file of weights"):
        load_weights(path)


def test_trainer_state_that_runs_code_is_refused(tmp_path: Path, state):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    path = save(tmp_path, 1, state[0], {"x": Evil()}, keep_last=1)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load(path)
    assert not (tmp_path / "evil").exists()


def test_settings():
    assert CheckpointSettings(every=100, keep_last=2, weights_every=None).keep_last == 2
    for bad in ({"every": 0}, {"keep_last": 0}, {"weights_every": -1}, {"every": True}):
        with pytest.raises(UserError, match=f"checkpoint.{next(iter(bad))} must be a whole number"):
            CheckpointSettings(**({"every": 1, "keep_last": 1, "weights_every": 1} | bad))
