"""Real processes, really killed: what is left resumes to the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zarr

from ffnlab.record.same import unequal

TINY = [
    "model.n_layers=4", "model.d_model=16", "model.n_heads=2", "model.seq_len=16", "data=counting",
    "tokenizer=byte", "train.batch_size=4", "train.eval_batches=2", "train.eval_every=6", "skip=unet",
    "threshold=learned", "model.dropout=0.1", "checkpoint.every=5", "probe.scan_tokens=64", "probe.tokens=16",
    "logger=none", "train.precision=fp32", "train.threads=1", "train.steps=20",
]  # fmt: skip
REGISTRY = Path(__file__).resolve().parents[1] / "configs/probe"
ALL_PROBES = f"probe=[{','.join(sorted(path.stem for path in REGISTRY.glob('*.yaml')))}]"
# A run that kills itself with SIGKILL right after the row of the step in the variable DIE_AT.
DYING = """
import os, signal, sys
from ffnlab import build
from ffnlab.recorded import Recorded
from ffnlab.run import run
log = Recorded.log
def dying(self, row):
    log(self, row)
    if row["step"] == int(os.environ["DIE_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
Recorded.log = dying
run(*build.compose(sys.argv[1:]))
"""


def train(root: Path, out: Path, *overrides: str, die_at: int | None = None) -> subprocess.CompletedProcess:
    line = [*TINY, f"out={out}", *overrides]
    command = [sys.executable, str(root / "train.py"), *line]
    env = dict(os.environ)
    if die_at is not None:
        command, env["DIE_AT"] = [sys.executable, "-c", DYING, *line], str(die_at)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def rows(out: Path) -> list[dict]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time_s" and not k.startswith("perf/")} for line in lines]


@pytest.mark.slow
def test_killed_twice_then_resumed(tmp_path: Path, root: Path):
    """SIGKILL before the first checkpoint, in mid-run, at an evaluation: the end is the same, also for probes
    that remember what they saw.
    """
    assert train(root, tmp_path / "whole", ALL_PROBES).returncode == 0
    for step in (3, 12, 17):
        killed = train(root, tmp_path / "killed", ALL_PROBES, die_at=step)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert json.loads((tmp_path / "killed/run.json").read_text())["status"] == "running"
    last = train(root, tmp_path / "killed", ALL_PROBES)
    assert last.returncode == 0, last.stderr
    assert list(unequal(tmp_path / "whole", tmp_path / "killed")) == []
    seen: Any = zarr.open_group(tmp_path / "whole/neurons.zarr", mode="r")
    assert seen["L00/trace/preact"].shape == (21, 16, 64)
    assert seen["L00/crossings/flips_mean"][:].max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_the_same_command_goes_on(tmp_path: Path, root: Path, signum: int, code: int):
    assert train(root, tmp_path / "whole", "train.steps=200").returncode == 0
    line = [sys.executable, str(root / "train.py"), *TINY, f"out={tmp_path / 'run'}", "train.steps=200"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 8) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signum)
    _, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    assert "goes on" in err
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "interrupted"
    assert train(root, tmp_path / "run", "train.steps=200").returncode == 0
    assert list(unequal(tmp_path / "whole", tmp_path / "run")) == []


@pytest.mark.slow
def test_a_run_killed_after_its_last_save_keeps_its_final_numbers(tmp_path: Path, root: Path):
    """Killed between the last checkpoint and the status: the resume trains nothing and ends alike."""
    whole = train(root, tmp_path / "run")
    assert whole.returncode == 0
    info = json.loads((tmp_path / "run/run.json").read_text())
    final = info.pop("final")
    (tmp_path / "run/run.json").write_text(json.dumps({**info, "status": "running"}))
    again = train(root, tmp_path / "run")
    assert again.returncode == 0, again.stderr
    assert "val/loss" in again.stdout
    assert json.loads((tmp_path / "run/run.json").read_text())["final"]["val/loss"] == final["val/loss"]


@pytest.mark.slow
def test_compiled_run(tmp_path: Path, root: Path):
    """train.compile=true differs from eager by rounding only, with all probes on."""
    small = ("train.steps=4", "model.dropout=0", "probe.every_step_until=4")
    eager = train(root, tmp_path / "eager", *small)
    assert eager.returncode == 0, eager.stderr
    compiled = train(root, tmp_path / "compiled", *small, ALL_PROBES, "train.compile=true")
    assert compiled.returncode == 0, compiled.stderr
    assert "recompile" not in compiled.stderr
    for a, b in zip(rows(tmp_path / "eager"), rows(tmp_path / "compiled"), strict=True):
        for key, value in a.items():
            if key.endswith("/loss"):
                assert b[key] == pytest.approx(value, abs=1e-3)
        assert any(key.startswith("probe/gradients/") for key in b) == (b["step"] > 0)
