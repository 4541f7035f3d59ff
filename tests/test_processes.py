"""Two processes under torchrun against one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
