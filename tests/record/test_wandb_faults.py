"""T12: whatever a W&B server does, or W&B's own process, a training ends with 0 and with its record whole."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ffnlab.record.checkpoint import newest_complete
from ffnlab.verbs.verify import findings

HERE = Path(__file__).parent
STEPS, FINISH_S = 60, 2
TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=2", "train.eval_every=20", "train.eval_batches=1",
    "checkpoint.every=20", "probe.scan_tokens=32", "probe.tokens=8", "probe.every=10", "train.threads=1",
    f"train.steps={STEPS}", "logger=wandb", "logger.mode=online", f"logger.finish_timeout={FINISH_S}",
]  # fmt: skip
Train = Callable[..., subprocess.Popen]


@pytest.fixture
def train(tmp_path: Path, root: Path, start: Callable, monkeypatch: pytest.MonkeyPatch) -> Train:
    """train(url, *overrides): a training that logs to a server at `url`, in `tmp_path`/run."""
    (tmp_path / "home").mkdir()
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # the process of another test's run

    def run(url: str, *overrides: str) -> subprocess.Popen:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "WANDB_MODE": "online"}
        env |= {"HOME": str(tmp_path / "home"), "WANDB_CONFIG_DIR": str(tmp_path / "home")}
        return start(root / "train.py", *TINY, f"out={tmp_path / 'run'}", *overrides, **env)

    return run


@pytest.fixture
def server(start: Callable) -> Callable[..., tuple[subprocess.Popen, str]]:
    """server(fault) -> its process and its address."""

    def serve(fault: str = "") -> tuple[subprocess.Popen, str]:
        process = start(HERE / "wandb_server.py", *([fault] if fault else []))
        return process, f"http://127.0.0.1:{int(process.stdout.readline())}"

    return serve


def rows(out: Path) -> list[int]:
    """The steps of the record so far."""
    file = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def until(reached: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to it"
        time.sleep(0.02)


def check(child: subprocess.Popen, out: Path, told: str | None) -> None:
    """The training ends with 0, soon after its last row, its record is whole, and one line at most (with
    `told` in it, where that is sure) says that W&B has no copy.
    """
    _, err = child.communicate(timeout=110)
    assert child.returncode == 0, err
    assert "Traceback" not in err
    assert "panic" not in err
    said = [line for line in err.splitlines() if "W&B cannot" in line or "is off" in line]
    assert len(said) == 1 if told else len(said) <= 1, err
    assert told is None or told in said[0]
    assert rows(out) == list(range(STEPS + 1))
    assert json.loads((out / "run.json").read_text())["status"] == "done"
    newest = newest_complete(out)
    assert newest is not None
    assert newest.name == f"step-{STEPS:06d}"
    assert [f"{f}" for f in findings(out)] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["garbage", "error", "refuses", "slow", "silent"])
def test_a_server_that_does_badly_from_the_start(fault: str, train: Train, server: Callable, tmp_path: Path):
    _, url = server(fault)
    check(train(url), tmp_path / "run", None if fault == "slow" else "W&B cannot be reached")


@pytest.mark.slow
def test_nobody_listens(train: Train, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    check(train(url), tmp_path / "run", "W&B cannot be reached")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["garbage", "error", "refuses", "slow", "silent"])
def test_a_server_that_does_badly_later(fault: str, train: Train, server: Callable, tmp_path: Path):
    _, url = server(f"later-{fault}")
    check(train(url), tmp_path / "run", None)


@pytest.mark.slow
def test_a_server_that_is_killed(train: Train, server: Callable, tmp_path: Path):
    process, url = server()
    child = train(url)
    until(lambda: len(rows(tmp_path / "run")) > 10)
    process.kill()
    check(child, tmp_path / "run", None)


@pytest.mark.slow
def test_the_process_of_wandb_is_killed(train: Train, server: Callable, tmp_path: Path):
    """It is a process of its own, which the kernel may choose when memory runs out."""
    _, url = server()
    child = train(url, "train.steps=60")
    until(lambda: len(rows(tmp_path / "run")) > 10)
    (core,) = (pid for pid in descendants(child.pid) if b"wandb-core" in name(pid))
    os.kill(core, signal.SIGKILL)
    check(child, tmp_path / "run", "WandbSink is off")


def descendants(pid: int) -> list[int]:
    """The processes that a process has begun, and theirs."""
    own = [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]
    return own + [further for child in own for further in descendants(child)]


def name(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
