"""Check that a run directory is whole: configuration, facts, metrics, checkpoints, per-neuron record.

Each finding says what is wrong and how to mend it. Exit code 0: nothing is wrong; 1: something is. Nothing is
changed, and nothing that a file holds can run.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ffnlab.errors import UserError
from ffnlab.record.checkpoint import broken
from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import STATUSES, load_config, read_info
from ffnlab.record.runs import no_run
from ffnlab.record.store import open_store

AGAIN = "the command of the run with the same out= goes on from the newest complete checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")


def run(args: argparse.Namespace) -> int:
    worst = 0
    if missing := [path for path in args.runs if not path.is_dir()]:
        raise UserError(*map(no_run, missing))
    for path in args.runs:
        found = list(findings(path))
        print(f"{path}: {f'{len(found)} found' if found else 'whole'}")
        for finding in found:
            print(f"  - {finding}")
        worst = max(worst, bool(found))
    return worst


def findings(path: Path) -> Iterator[str]:
    """What is wrong with a run directory, one sentence each."""
    try:
        config = load_config(path)
    except UserError as error:
        yield f"{error}; nothing else can be checked"
        return
    try:
        info = read_info(path)
    except UserError as error:
        yield str(error)
        info = {}
    yield from wrong_facts(info)
    yield from wrong_checkpoints(path, info)
    try:
        metrics = Metrics(path / "metrics.jsonl")
        rows = metrics.read()
    except UserError as error:
        yield f"{error}, and {AGAIN}"
        return
    yield from wrong_metrics(metrics.path, rows, config, info)
    yield from wrong_neurons(path / "neurons.zarr", rows)


def wrong_facts(info: dict[str, Any]) -> Iterator[str]:
    if not info:
        yield f"run.json is missing or empty: {AGAIN} and writes it anew"
    elif info.get("status") not in STATUSES:
        yield f"run.json: status is {info.get('status')!r}; expected one of {', '.join(STATUSES)}"


def wrong_checkpoints(path: Path, info: dict[str, Any]) -> Iterator[str]:
    folder = path / "checkpoints"
    every = sorted(folder.glob("step-*"))
    for each in every:
        if problem := broken(each):
            yield f"{each.relative_to(path)}: {problem}: remove it; the one before is used"
    done = info.get("status") == "done"
    if done and not any(broken(each) is None for each in every):
        yield "the run is done but has no complete checkpoint: it can be read, not sampled or resumed"


def wrong_metrics(
    file: Path, rows: list[dict[str, Any]], config: dict[str, Any], info: dict[str, Any]
) -> Iterator[str]:
    """Torn lines, steps that fall or are missing, an end that is not the run's."""
    if not file.exists():
        yield f"{file.name} is missing: the losses of this run are lost"
        return
    raw = file.read_bytes()
    if raw and not raw.endswith(b"\n"):
        yield f"{file.name} ends in a torn line, of a kill: {AGAIN}, which drops it"
    steps = [row["step"] for row in rows]
    for before, after in pairwise(steps):
        if after < before:
            yield f"{file.name}: step {after} follows step {before}: two processes wrote it, or it was edited"
            break
    every = config.get("train", {}).get("log_every", 1)
    last = max(steps, default=0)
    missing = sorted(set(range(every, last + 1, every)) - set(steps))
    if missing:
        yield f"{file.name}: {len(missing)} steps have no row, the first is {missing[0]}"
    final = info.get("final", {}).get("step")
    if info.get("status") == "done" and final is not None and final != last:
        yield f"{file.name} ends at step {last}, run.json at step {final}: one of them is of another run"


def wrong_neurons(store: Path, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Arrays that cannot be read, steps that rise not or lie past the metrics, lengths that differ."""
    if not store.exists():
        return
    import zarr

    last = max((row["step"] for row in rows), default=0)
    try:
        members = dict(open_store(store).members(max_depth=None))
        arrays: dict[str, Any] = {k: node for k, node in members.items() if isinstance(node, zarr.Array)}
        groups = {name.rpartition("/")[0] for name in arrays}
        for group in sorted(groups):
            if f"{group}/step" not in arrays:
                continue  # recorded once, not by step
            steps = arrays[f"{group}/step"][:]
            if len(steps) and (steps[1:] <= steps[:-1]).any():
                yield f"neurons.zarr/{group}: its steps do not rise: {AGAIN}, which cuts it"
            if len(steps) and steps[-1] > last:
                yield (
                    f"neurons.zarr/{group} goes on to step {steps[-1]}, metrics.jsonl ends at {last}: "
                    f"{AGAIN}, which cuts it"
                )
            for name, array in arrays.items():
                if name.rpartition("/")[0] == group and len(steps) != array.shape[0]:
                    yield f"neurons.zarr/{name} has {array.shape[0]} rows for {len(steps)} steps: {AGAIN}"
                if name.rpartition("/")[0] == group:
                    array[:]  # every chunk can be read
    except Exception as error:  # zarr and its codecs raise many kinds for one torn file
        why = f"{type(error).__name__}: {str(error)[:100]}"
        yield f"neurons.zarr cannot be read ({why}): move it away; {AGAIN}"
