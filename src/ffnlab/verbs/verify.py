"""Check that a run directory is whole: configuration, facts, metrics, checkpoints, per-neuron record.

Each finding says what is wrong and how to mend it. Exit code 0: nothing is wrong; 1: something is. Nothing is
changed, and nothing that a file holds can run.
"""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ffnlab.errors import UserError
from ffnlab.record.checkpoint import broken
from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import STATUSES, load_config, read_info
from ffnlab.record.runs import no_run
from ffnlab.record.same import unequal
from ffnlab.record.store import open_store
from ffnlab.record.tensors import load_weights

AGAIN = "the command of the run with the same out= goes on from the newest complete checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    about = "also say where results differ, in any bit, from those of this run"
    parser.add_argument("--same-as", type=Path, metavar="RUN", help=about)


def run(args: argparse.Namespace) -> int:
    worst = 0
    given = [*args.runs, *([args.same_as] if args.same_as else [])]
    if missing := [path for path in given if not path.is_dir()]:
        raise UserError(*map(no_run, missing))
    for path in args.runs:
        found = list(findings(path))
        if args.same_as is not None:
            found += differing(args.same_as, path)
        print(f"{path}: {f'{len(found)} found' if found else 'whole'}")
        for finding in found:
            print(f"  - {finding}")
        worst = max(worst, bool(found))
    return worst


def differing(other: Path, path: Path) -> list[str]:
    """Where the results of two runs differ."""
    try:
        return list(unequal(other, path))
    except UserError as error:  # of a metrics.jsonl that cannot be read
        return [str(error)]


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
    yield from disagreeing(path / "neurons.zarr", rows, saved_step(path))


def wrong_facts(info: dict[str, Any]) -> Iterator[str]:
    if not info:
        yield f"run.json is missing or empty: {AGAIN} and writes it anew"
    elif info.get("status") not in STATUSES:
        yield f"run.json: status is {info.get('status')!r}; expected one of {', '.join(STATUSES)}"


def wrong_checkpoints(path: Path, info: dict[str, Any]) -> Iterator[str]:
    """Checkpoints that are torn or another run's, weights that cannot be read, an end without its own."""
    folder = path / "checkpoints"
    every = sorted(folder.glob("step-*"))
    for each in every:
        if problem := broken(each):
            yield f"{each.relative_to(path)}: {problem}: remove it; the one before is used"
        elif (owner := json.loads((each / "manifest.json").read_bytes())["run"]) != info.get("id", owner):
            yield f"{each.relative_to(path)} is of run {owner}, this is run {info['id']}: move it away"
    for file in sorted(folder.glob("weights-*.safetensors")):
        try:
            load_weights(file)
        except UserError as error:
            yield f"{error}: remove it; a checkpoint of that step is not needed to go on"
    if info.get("status") != "done":
        return
    if not any(broken(each) is None for each in every):
        yield "the run is done but has no complete checkpoint: it can be read, not sampled or resumed"
    elif (last := info.get("final", {}).get("step")) and saved_step(path) != last:
        yield (
            f"the run is done at step {last}, its newest complete checkpoint is of step {saved_step(path)}: "
            f"set status to interrupted in run.json; {AGAIN}"
        )


def saved_step(path: Path) -> int:
    """The step of the newest complete checkpoint, 0 where there is none."""
    whole = (each for each in (path / "checkpoints").glob("step-*") if broken(each) is None)
    return max((int(each.name.removeprefix("step-")) for each in whole), default=0)


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
    if twice := sorted(
        {x for x, y in pairwise(row["step"] for row in rows if "test/loss" not in row) if x == y}
    ):
        yield f"{file.name}: step {twice[0]} stands there twice: two processes wrote it, or it was edited"
    every = config.get("train", {}).get("log_every", 1)
    last = max(steps, default=0)
    missing = sorted(set(range(every, last + 1, every)) - set(steps))
    if missing:
        yield f"{file.name}: {len(missing)} steps have no row, the first is {missing[0]}"
    final = info.get("final", {}).get("step")
    if info.get("status") == "done" and final is not None and final != last:
        yield f"{file.name} ends at step {last}, run.json at step {final}: one of them is of another run"


def disagreeing(store: Path, rows: list[dict[str, Any]], until: int) -> Iterator[str]:
    """Where the record of neurons is not that of metrics.jsonl, up to the newest checkpoint: until then both
    are on the disk. The mean of `activity/active_frac` over neurons is the number in the row.
    """
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for key in row if row["step"] <= until else ():
            if match := re.fullmatch(r"probe/activity/(L\d+)/active_frac", key):
                found.setdefault(match[1], {})[row["step"]] = row[key]
    if found and not store.exists():
        yield f"{store.name} is missing: what the neurons of this run did is lost but for its means"
        return
    for layer, means in sorted(found.items()):
        try:
            group = open_store(store)[f"{layer}/activity"]
            steps, values = group["step"][:], group["active_frac"][:]
        except Exception:  # noqa: S112  # said by `wrong_neurons`
            continue
        there = dict(zip(steps.tolist(), values.mean(axis=1).tolist(), strict=False))
        if lacking := sorted(means.keys() - there.keys()):
            yield (
                f"neurons.zarr/{layer}/activity lacks {len(lacking)} steps that metrics.jsonl has, the first "
                f"is {lacking[0]}: figures leave them out (or probe.budget_gib was reached)"
            )
        other = [step for step, mean in means.items() if step in there and abs(there[step] - mean) > 1e-5]
        if other:
            yield (
                f"neurons.zarr/{layer}/activity: step {other[0]} has a mean active_frac of "
                f"{there[other[0]]:.4f}, metrics.jsonl has {means[other[0]]:.4f}: one is another run's"
            )


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
