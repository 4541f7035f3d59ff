"""Two processes under torchrun against one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ffnlab import build
from ffnlab.record.checkpoint import load

TINY = [
    "model.n_layers=4", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.eval_batches=3", "train.eval_every=2", "probe.scan_tokens=64", "probe.tokens=16",
    "logger=none", "train.precision=fp32", "train.threads=1", "train.steps=4", "optim=adamw", "skip=unet",
    "threshold=learned", "model.zero_out=false", "optim.eps=1e-3", "checkpoint.every=2",
]  # fmt: skip


def torchrun(root: Path, n: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    command += [str(root / "train.py"), *TINY, *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path, root: Path):
    """T7: the same global batch of 8 windows in 1 x 8, 1 x (2, 4) and 2 x (2, 2)."""
    one = torchrun(
        root,
        1,
        f"out={tmp_path / 'one'}",
        "probe=[default,gradients]",
        "train.batch_size=8",
        "train.eval_batches=1",
    )
    assert one.returncode == 0, one.stderr
    two = torchrun(
        root,
        2,
        f"out={tmp_path / 'two'}",
        "probe=[default,gradients]",
        "train.batch_size=2",
        "train.grad_accum=2",
        "train.eval_batches=1",
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("done: ") == 1  # one process records
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert a["tokens"] == b["tokens"]
        pulled = [key for key in a if key.startswith("probe/gradients/") and key.endswith("/norm")]
        assert len(pulled) > 20 or a["step"] == 0
        for key in ("train/loss", "val/loss", "optim/grad_norm", *pulled):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=2e-5)
    (a, _), (b, _) = (load(tmp_path / run / "checkpoints/step-000004") for run in ("one", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=1e-4)


# What one of two processes adds to the gradient; the first one writes the sum.
PART = """
import sys, torch
from contextlib import nullcontext
from ffnlab import build
from ffnlab.processes import processes
from ffnlab.update import gradients
batches, out, *overrides = sys.argv[1:]
model = build.model(build.compose(overrides)[0], 97)
with processes("cpu") as these:
    micro = torch.load(batches, weights_only=True)[these.rank]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    mean, count = gradients(model.loss, micro, nullcontext, scaler, these.add_up)
    these.add_up([p.grad for p in model.parameters()])
    if these.leads:
        torch.save({"mean": mean, "count": count, "grads": [p.grad for p in model.parameters()]}, out)
"""


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path: Path, unused_port: int):
    """T7: unequal counts of targets, a micro-batch without any and a ragged last one, against one process in
    one pass, written with PyTorch's own cross-entropy: to 1e-6.
    """
    torch.manual_seed(0)
    x, y = torch.randint(0, 97, (7, 16)), torch.randint(0, 97, (7, 16))
    y[0, 3:], y[2:4], y[5, ::2] = -100, -100, -100
    micro = [(x[i], y[i]) for i in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7))]
    torch.save([micro[:2], micro[2:]], tmp_path / "batches.pt")
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    command = [sys.executable, "-c", PART, str(tmp_path / "batches.pt"), str(tmp_path / "sum.pt"), *TINY]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)
    ]
    assert [process.wait(timeout=240) for process in ranks] == [0, 0]
    found = torch.load(tmp_path / "sum.pt", weights_only=True)
    model = build.model(build.compose(TINY)[0], 97)
    mean = torch.nn.functional.cross_entropy(model(x)[..., :97].flatten(0, 1), y.flatten())
    mean.backward()
    assert found["count"] == int((y >= 0).sum())
    assert found["mean"] == pytest.approx(mean.item(), rel=1e-6)
    for got, p in zip(found["grads"], model.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, atol=1e-6, rtol=1e-5)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all(tmp_path: Path, root: Path):
    """T5: the one that does not lead is told; the leader saves, and the run goes on to the same bits."""
    long = ("train.steps=200", "train.batch_size=2", "checkpoint.every=1000")
    whole = torchrun(root, 2, f"out={tmp_path / 'whole'}", *long)
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(root / "train.py"), *TINY, f"out={out}", *long]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while time.monotonic() < until and not ((out / "metrics.jsonl").exists() and len(rows(out)) > 3):
        time.sleep(0.02)
    leader = json.loads((out / "lock").read_text())["pid"]
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    (follower,) = {int(pid) for pid in children} - {leader}
    os.kill(follower, signal.SIGTERM)
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "SIGTERM after step" in err
    info = json.loads((out / "run.json").read_text())
    assert info["status"] == "interrupted"
    assert 1 < info["final"]["step"] < 200
    again = torchrun(root, 2, f"out={out}", *long)
    assert again.returncode == 0, again.stderr
    (a, _), (b, _) = (load(run / "checkpoints/step-000200") for run in (tmp_path / "whole", out))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_processes_resume(tmp_path: Path, root: Path):
    schedule = ("schedule=constant", "train.batch_size=4")
    whole = torchrun(root, 2, f"out={tmp_path / 'whole'}", *schedule)
    assert whole.returncode == 0, whole.stderr
    first = torchrun(root, 2, f"out={tmp_path / 'parts'}", *schedule, "train.steps=2")
    assert first.returncode == 0, first.stderr
    second = torchrun(root, 2, f"out={tmp_path / 'parts'}", *schedule)
    assert second.returncode == 0, second.stderr
    (a, _), (b, _) = (load(tmp_path / run / "checkpoints/step-000004") for run in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    again = torchrun(root, 2, f"out={tmp_path / 'parts'}", *schedule)
    assert again.returncode == 0
    assert "done already" in again.stdout


def test_world_size_without_torchrun_is_explained(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = [sys.executable, str(root / "train.py"), *TINY, f"out={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "torchrun --nproc_per_node" in done.stderr
    assert not (tmp_path / "run").exists()
