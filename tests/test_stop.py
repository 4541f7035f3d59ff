"""SIGTERM and SIGINT in every phase of a run: the right exit code, and it goes on to the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ffnlab import build
from ffnlab.ending import AtEnd
from ffnlab.probe import Observer
from ffnlab.record.checkpoint import load, newest_complete
from ffnlab.record.files import HashedFile
from ffnlab.recorded import Recorded
from ffnlab.run import run
from ffnlab.session import Session

TINY = [
    "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=2", "train.eval_every=4", "checkpoint.every=3", "train.steps=8",
    "data.n_documents=40", "data.test_frac=0.2", "model.dropout=0.1", "threshold=learned", "skip=none",
    "probe=[default,crossings]", "probe.every=2", "probe.scan_tokens=64", "probe.tokens=16", "logger=none",
    "train.precision=fp32", "train.threads=1",
]  # fmt: skip


def start(out: Path, at_end: AtEnd | None = None) -> dict:
    cfg, choices = build.compose([*TINY, f"out={out}"])
    return run(cfg, choices, at_end)


def rows(out: Path) -> list[dict]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time_s" and not k.startswith("perf/")} for line in lines]


def status(out: Path) -> str:
    return json.loads((out / "run.json").read_text())["status"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stop") / "whole"
    start(out)
    return out


@pytest.fixture
def as_from_train_py() -> Iterator[None]:
    """The handler of SIGTERM outside a run, which train.py installs."""

    def terminated(signum, frame):
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, terminated)
    yield
    signal.signal(signal.SIGTERM, before)


class At:
    """Sends its signals to this process, once, when a phase is reached."""

    def __init__(self, patch: pytest.MonkeyPatch, signum: int, times: int):
        self.patch, self.signum, self.times, self.after = patch, signum, times, 0

    def now(self) -> None:
        times, self.times = self.times, 0
        for _ in range(times):
            os.kill(os.getpid(), self.signum)
            time.sleep(0.001)  # the handler runs here

    def call(self, owner: object, name: str, when: Callable[..., bool] = lambda *args: True) -> None:
        real = getattr(owner, name)

        def patched(*args, **options):
            if when(*args) is True:
                self.now()
            return real(*args, **options)

        self.patch.setattr(owner, name, patched)

    def batches(self, where: int | str) -> None:
        """Before the second batch of the evaluation of a step, or of the test; `after` counts later ones."""
        real, now = Session.measured, [None]

        def measured(session, batches, stop):
            def watched():
                for i, batch in enumerate(batches):
                    if now == [where] and i == 1:
                        self.now()
                    self.after += now == [where] and i > 1
                    yield batch

            return real(session, watched(), stop)

        self.patch.setattr(Session, "measured", measured)
        self.call(Recorded, "evaluate", lambda _, step: now.__setitem__(0, step))
        self.call(Session, "test", lambda *_: now.__setitem__(0, "test"))

    def scan(self, step: int) -> None:
        real = Observer.scan
        self.patch.setattr("ffnlab.probe.core.SCAN_CHUNK_TOKENS", 16)

        def scan(observer, at, check):
            chunks = iter(range(10))

            def checked():
                if at == step and next(chunks) == 1:
                    self.now()
                check()

            return real(observer, at, checked)

        self.patch.setattr(Observer, "scan", scan)

    def drawing(self, path: Path) -> list[Path]:
        os.kill(os.getpid(), self.signum)  # one: the main thread goes on at once
        time.sleep(2)
        return []


# In the order in which one run comes by: what to do, the newest checkpoint after one signal, after two.
PHASES: dict[str, tuple[Callable[[At], object], int, int]] = {
    "building": (lambda at: at.call(build, "model"), 0, 0),
    "before step 0": (lambda at: at.call(Session, "begin"), 0, 0),
    "evaluation at 0": (lambda at: at.batches(0), 0, 0),
    "scan at 0": (lambda at: at.scan(0), 0, 0),
    "step 2": (lambda at: at.call(Session, "batches", lambda _, step: step == 2), 2, 0),
    "evaluation at 4": (lambda at: at.batches(4), 4, 3),
    "scan at 4": (lambda at: at.scan(4), 4, 3),
    "row of 4": (lambda at: at.call(Recorded, "log", lambda _, row: row["step"] == 4), 5, 3),
    "save": (lambda at: at.call(HashedFile, "write"), 7, 3),
    "building again": (lambda at: at.call(build, "model"), 7, 3),
    "evaluation at 8": (lambda at: at.batches(8), 8, 6),
    "test": (lambda at: at.batches("test"), 8, 8),
    "drawing": (lambda at: None, 8, 8),
}
FEW = ("evaluation at 4", "scan at 4", "drawing")


@pytest.mark.filterwarnings("ignore:.*holds no checkpoint yet")
@pytest.mark.parametrize(
    ("signum", "times", "phases"),
    [
        (signal.SIGTERM, 1, FEW),
        pytest.param(signal.SIGINT, 1, tuple(PHASES), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, tuple(PHASES), marks=pytest.mark.slow),
    ],
)
def test_a_run_is_stopped_in_every_phase_and_ends_alike(
    tmp_path: Path,
    whole: Path,
    as_from_train_py: None,
    capfd: pytest.CaptureFixture,
    signum: int,
    times: int,
    phases: tuple[str, ...],
):
    out = tmp_path / "run"
    for phase in phases:
        prepare, once, twice = PHASES[phase]
        with pytest.MonkeyPatch.context() as patch:
            prepare(at := At(patch, signum, times))
            with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
                start(out, at.drawing if phase == "drawing" else None)
        code = stopped.value.code if isinstance(stopped.value, SystemExit) else 130
        assert code == 128 + signum, phase
        assert at.after == 0, phase
        if phase == "building":
            assert not out.exists()
            continue
        assert status(out) == ("done" if phase == "drawing" else "interrupted"), phase
        assert not (out / "lock").exists()
        newest = newest_complete(out)
        assert (newest.name if newest else "step-000000") == f"step-{(once, twice)[times - 1]:06d}", phase
    assert "done already" in (start(out), capfd.readouterr().out)[1]
    assert rows(out) == rows(whole)
    (a, ta), (b, tb) = (load(path / "checkpoints/step-000008") for path in (whole, out))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert ta["progress"] | {"time_s": 0} == tb["progress"] | {"time_s": 0}


def test_an_interrupt_while_train_is_still_importing(root: Path, tmp_path: Path):
    (tmp_path / "hydra.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(root / "train.py")], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "train.py: interrupted\n")
