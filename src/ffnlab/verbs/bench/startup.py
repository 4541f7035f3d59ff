"""Seconds from the command to the first step of train.py."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ffnlab.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")


def run(args: argparse.Namespace) -> int:
    """Start train.py in the current folder for one step, and time it until that step is on record."""
    if not Path("train.py").is_file():
        raise UserError(
            "bench startup runs ./train.py, and this folder has none: run it in a checkout of ffnlab"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        extra = ("logger=none", "train.steps=1", "train.eval_batches=1", f"out={out}")
        command = (sys.executable, "train.py", *args.overrides, *extra)
        start = time.perf_counter()
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            while (running := process.poll() is None) and not has_step(out / "metrics.jsonl", 1):
                time.sleep(0.02)
            seconds = time.perf_counter() - start
            code = process.wait()
            if not running and not has_step(out / "metrics.jsonl", 1):
                errors.seek(0)
                lines = errors.read().splitlines()
                raise UserError(f"train.py made no step (exit code {code}):", *lines[-20:])
    if args.json:
        print(json.dumps({"startup_s": seconds}))
    else:
        print(f"{seconds:.1f} s from the command to the end of the first step")
    return 0


def has_step(metrics: Path, step: int) -> bool:
    """Whether the record holds the row of `step`."""
    try:
        return any(f'"step": {step},' in line for line in metrics.read_text().splitlines())
    except OSError:
        return False
