"""A disk that fills while a run goes on: the record stops it cleanly, a copy never does."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import pytest
import torch
import zarr.storage._local as local

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.record.checkpoint import load, newest_complete
from ffnlab.record.files import HashedFile
from ffnlab.record.sinks import Sink
from ffnlab.recorded import Recorded
from ffnlab.run import run
from ffnlab.session import Session

TINY = [
    "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=2", "train.eval_batches=2", "train.eval_every=4",
    "checkpoint.every=3", "train.steps=8", "model.dropout=0.1", "skip=none", "probe.every=1",
    "probe.scan_tokens=64", "probe.tokens=16", "train.precision=fp32", "train.threads=1",
]  # fmt: skip


def start(out: Path, *overrides: str, at_end: Callable | None = None) -> dict:
    cfg, choices = build.compose([*TINY, "logger=none", *overrides, f"out={out}"])
    return run(cfg, choices, at_end)


def rows(out: Path) -> list[dict]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time_s" and not k.startswith("perf/")} for line in lines]


def status(out: Path) -> str:
    return json.loads((out / "run.json").read_text())["status"]


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("disk") / "whole"
    start(out)
    return out


def fill_metrics(patch: pytest.MonkeyPatch, at_step: int) -> None:
    """The file takes half of the row of a step."""

    class Filling(FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if f'"step": {at_step},'.encode() in data:
                super().write(data[: len(data) // 2])
                full()
            return super().write(data) or 0

    patch.setattr("ffnlab.record.metrics.FileIO", Filling)


def fill_neurons(patch: pytest.MonkeyPatch, at_step: int) -> None:
    """The store takes nothing of the second flush."""
    real = local._put

    def put(path, *args, **options):
        out = next(folder.parent for folder in path.parents if folder.name == "neurons.zarr")
        return full() if (out / "checkpoints/step-000003").exists() else real(path, *args, **options)

    patch.setattr(local, "_put", put)


def fill_checkpoint(patch: pytest.MonkeyPatch, at_step: int) -> None:
    real = HashedFile.write

    def write(file, data):
        if f"step-{at_step:06d}" not in str(file._file.name):
            return real(file, data)
        file.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise file.error

    patch.setattr(HashedFile, "write", write)


@pytest.mark.parametrize(
    ("fill", "path"),
    [
        (fill_metrics, r"metrics\.jsonl"),
        pytest.param(fill_neurons, r"neurons\.zarr", marks=pytest.mark.slow),
        pytest.param(fill_checkpoint, "step-000006", marks=pytest.mark.slow),
    ],
)
def test_the_record_cannot_be_written(tmp_path: Path, whole: Path, fill: Callable, path: str):
    """The message has path and bytes, the checkpoint before is whole, and with room the run ends alike."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, 6)
        with pytest.raises(
            UserError, match=rf"{path}: the disk is full: [\d,]+ bytes to write, [\d,]+ bytes free"
        ):
            start(out)
    assert status(out) == "failed"
    newest = newest_complete(out)
    assert newest is not None
    assert newest.name == "step-000003"
    assert not (out / "lock").exists()
    start(out)
    assert rows(out) == rows(whole)
    (a, _), (b, _) = (load(run / "checkpoints/step-000008") for run in (whole, out))
    assert all(torch.equal(a[name], b[name]) for name in a)


def killed_at(out: Path, step: int) -> None:
    """The run dies right after the row of a step."""
    log = Recorded.log

    def dying(self, row):
        log(self, row)
        if row["step"] == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorded, "log", dying)
        with pytest.raises(KeyboardInterrupt):
            start(out)


@pytest.mark.slow
def test_broken_checkpoints_never_begin_a_run_anew_unsaid(tmp_path: Path, whole: Path):
    """T3: the newest complete one is used, with one warning; none at all is an error; only a folder that is
    moved away begins at step 0, and that is said.
    """
    out = tmp_path / "run"
    killed_at(out, 7)
    os.truncate(out / "checkpoints/step-000006/trainer.pt", 500)
    with pytest.warns(UserWarning, match="step-000006 is broken .* not used") as caught:
        killed_at(out, 5)
    assert sum("broken" in str(warning.message) for warning in caught) == 1
    assert json.loads((out / "run.json").read_text())["final"]["step"] == 5
    (out / "checkpoints/step-000003/manifest.json").unlink()
    with pytest.raises(UserError, match="none of the 2 checkpoints is complete"):
        start(out)
    assert len(rows(out)) == 6  # nothing was dropped
    shutil.rmtree(out / "checkpoints")
    with pytest.warns(UserWarning, match="begins again at step 0, its record up to step 5 is dropped"):
        start(out)
    assert rows(out) == rows(whole)


class Full(Sink):
    """A copy whose disk is full from the third row on."""

    def log(self, row: dict) -> None:
        if row["step"] > 2:
            full()


def test_a_copy_cannot_be_written(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch):
    init = Session.__init__

    def with_copy(session, *args):
        init(session, *args)
        session.sink = Full()

    monkeypatch.setattr(Session, "__init__", with_copy)
    with pytest.warns(UserWarning, match="Full is off") as caught:
        start(tmp_path / "run", at_end=full)
    said = [str(warning.message) for warning in caught]
    assert sum("Full is off for the rest of this run (log failed: OSError" in line for line in said) == 1
    assert sum("at the end of the run: OSError: [Errno 28]" in line for line in said) == 1
    assert status(tmp_path / "run") == "done"
    assert rows(tmp_path / "run") == rows(whole)


def test_no_room_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Said before the first step, not at the first checkpoint."""
    monkeypatch.setattr("ffnlab.recorded.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"checkpoints: the disk is full: [\d,]+ bytes to write"):
        start(tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[Path, str], None]]:
    """Mounts a small disk on a folder, or gives it another size; skips where that is not allowed."""
    mounted = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"needs the right to mount a file system: {made.stderr.strip()}")
        if folder not in mounted:
            mounted.append(folder)

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def train(root: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "train.py"), *TINY, *overrides, f"out={out}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_real_disk_that_is_too_small(tmp_path: Path, root: Path, whole: Path, disk):
    """Exit code 1 and one message; with a larger disk the same command goes on to the same end."""
    out = tmp_path / "disk" / "run"
    disk(out.parent, "size=560k")
    failed = train(root, out, "logger=none", "checkpoint.keep_last=null")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "the disk is full: " in failed.stderr
    assert "Traceback" not in failed.stderr
    assert newest_complete(out) is not None
    disk(out.parent, "remount,size=50m")
    again = train(root, out, "logger=none", "checkpoint.keep_last=null")
    assert again.returncode == 0, again.stderr
    assert "going on with" in again.stdout
    assert rows(out) == rows(whole)


@pytest.mark.slow
def test_real_disks_of_the_copies_are_full(tmp_path: Path, root: Path, whole: Path, disk):
    """No room for W&B's files and for the figures: exit code 0, and the record is whole."""
    out = tmp_path / "run"
    for folder in ("wandb", "figures"):
        disk(out / folder, "size=8k")
        (out / folder / "filler").write_bytes(b"\0" * 4096)
    done = train(root, out, "logger=wandb", "logger.mode=offline", "logger.finish_timeout=5")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is off for the rest of this run") == 1
    assert status(out) == "done"
    assert rows(out) == rows(whole)
