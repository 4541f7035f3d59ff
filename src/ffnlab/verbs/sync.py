"""Write the record of runs as one clean W&B run each: to the server when you are logged in, else offline.

The rows of metrics.jsonl, the configuration and the pictures in figures/ go into a W&B run with the id of the
run directory, however often the run was resumed. Offline, the folders in RUN/wandb that sessions of the run
left are replaced by the new one; `wandb sync RUN/wandb/offline-run-*` uploads it later.
"""

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.foreign import inside
from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import load_config, read_info
from ffnlab.record.sinks import Sinks
from ffnlab.record.wandb import WandbSink


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories or study folders")
    parser.add_argument(
        "--mode", default="auto", choices=("auto", "online", "offline"), help="auto: online when logged in"
    )
    parser.add_argument("--project", metavar="NAME", help="instead of the run's own")
    parser.add_argument("--entity", metavar="NAME", help="instead of the run's own")


def run(args: argparse.Namespace) -> int:
    runs = [run for path in args.runs for run in runs_of(path)]
    plans = [(path, load_config(path), read_info(path)) for path in runs]
    if unfit := [path for path, _, info in plans if not {"id", "name"} <= info.keys()]:
        raise UserError(
            *(
                f"{path} has no run.json that names it, so it cannot be synced: its command writes one"
                for path in unfit
            )
        )
    if busy := [path for path, _, info in plans if info.get("status") == "running"]:
        raise UserError(*(f"{path} is running: sync it when it is over" for path in busy))
    whole = [copy(path, cfg, info, args) for path, cfg, info in plans]
    return 0 if all(whole) else 1


def runs_of(path: Path) -> list[Path]:
    """A run directory itself, or the runs in a study folder, by name."""
    if (path / "config.yaml").exists():
        return [path]
    return sorted(file.parent for file in path.glob("*/config.yaml")) or [path]  # which is then refused


def copy(path: Path, cfg: dict[str, Any], info: dict[str, Any], args: argparse.Namespace) -> bool:
    """One run, and whether it went through; the offline folders of sessions go when the new one is whole."""
    pictures = [inside(picture, path) for picture in sorted((path / "figures").glob("*.png"))]
    sink = tracker(cfg, args)
    before = set((path / "wandb").glob("offline-run-*"))
    copies = Sinks([sink])
    copies.start({**info, "path": str(path), "resumed": False}, cfg)
    rows = Metrics(path / "metrics.jsonl").read() if (path / "metrics.jsonl").exists() else []
    last: dict[str, Any] = {}
    for row in rows:
        copies.log(row)
        last.update(row)
    for picture in pictures:
        copies.image(picture.stem, picture, int(last.get("step", 0)))
    final = {k: v for k, v in last.items() if isinstance(v, int | float) and math.isfinite(v)}
    if not copies.finish(str(info.get("status", "done")), final):
        print(f"{path}: NOT copied whole, for the reason above; the same command begins again")
        return False
    made = set((path / "wandb").glob("offline-run-*")) - before
    if sink.mode == "offline" and made:
        for folder in before:
            shutil.rmtree(folder)
    where = f"offline in {next(iter(made))}" if made else "sent"
    print(f"{path}: {len(rows)} rows {where}")
    return True


def tracker(cfg: dict[str, Any], args: argparse.Namespace) -> WandbSink:
    """The W&B sink that the run names, or the default one when it had another or none."""
    node = dict(cfg.get("logger") or {})
    if node.pop("_target_", None) != "ffnlab.record.wandb.WandbSink":
        node = dict(build.compose(["logger=wandb"])[0]["logger"])
        node.pop("_target_")
    node |= {"mode": args.mode, "group": node.get("group") or cfg.get("study")}
    node |= {key: value for key in ("project", "entity") if (value := getattr(args, key)) is not None}
    return WandbSink(**{"artifact": False, "job_type": "train", **node})  # runs of before had neither
