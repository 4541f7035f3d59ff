"""Whether two runs are the same to the bit, and where they differ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffnlab.errors import UserError
from ffnlab.record.checkpoint import load
from ffnlab.record.metrics import Metrics
from ffnlab.record.store import open_store

# What a clock says, of rows and of the progress in a checkpoint.
CLOCKS = ("time_s", "perf/tok_per_s", "perf/step_ms", "perf/probe_frac", "perf/mfu")


def unequal(a: Path, b: Path) -> Iterator[str]:
    """Where the results of the runs in `a` and `b` differ, one sentence each; nothing when all is equal.

    Compared are the rows of metrics.jsonl without CLOCKS, every value of neurons.zarr, and every tensor and
    number (weights, optimizer, probes, progress) of the checkpoints that both have, which the last must be.
    nan equals nan; 0.0 is not -0.0.
    """
    yield from unequal_rows(a, b)
    yield from unequal_arrays(a, b)
    yield from unequal_checkpoints(a, b)


def unequal_rows(a: Path, b: Path) -> Iterator[str]:
    """The first row that differs, or the first that one of them lacks."""
    there, here = (Metrics(run / "metrics.jsonl").read() for run in (a, b))
    for number, (old, new) in enumerate(zip(there, here, strict=False), 1):
        keys = [key for key in {**old, **new} if key not in CLOCKS]
        if wrong := [key for key in keys if not _same(old.get(key), new.get(key))]:
            shown = f"{wrong[0]} is {old.get(wrong[0])} and {new.get(wrong[0])}"
            yield f"metrics.jsonl: line {number} (step {old['step']} and {new['step']}): {shown}"
            return
    if len(there) != len(here):
        yield f"metrics.jsonl: {len(there)} and {len(here)} lines; those that both have are equal"


def unequal_arrays(a: Path, b: Path) -> Iterator[str]:
    """Arrays of neurons.zarr that differ in shape, kind, axes or any bit, and those that one lacks."""
    there, here = (_arrays(run / "neurons.zarr") for run in (a, b))
    for name in sorted(there.keys() | here.keys()):
        if name not in there or name not in here:
            yield f"neurons.zarr/{name}: only in {a if name in there else b}"
            continue
        (axes, old), (other_axes, new) = there[name], here[name]
        if (axes, old.dtype, old.shape) != (other_axes, new.dtype, new.shape):
            kinds = " and ".join(
                f"{v.dtype} {dict(zip(x, v.shape, strict=True))}" for x, v in (there[name], here[name])
            )
            yield f"neurons.zarr/{name}: {kinds}"
        elif _bits(old) != _bits(new):
            rows = np.flatnonzero([_bits(x) != _bits(y) for x, y in zip(old, new, strict=True)])
            yield f"neurons.zarr/{name}: {len(rows)} of {len(old)} rows differ, the first is row {rows[0]}"


def unequal_checkpoints(a: Path, b: Path) -> Iterator[str]:
    """Another last checkpoint, and tensors and numbers that differ in those that both have.

    Which earlier ones are kept is no result: a stop saves one of its own, and an older one makes room for it.
    """
    there, here = ({p.name for p in (run / "checkpoints").glob("step-*")} for run in (a, b))
    if (old_last := max(there, default="none")) != (new_last := max(here, default="none")):
        yield f"checkpoints: the last is {old_last} and {new_last}"
    for name in sorted(there & here):
        try:
            old, new = (load(run / "checkpoints" / name) for run in (a, b))
        except UserError as error:
            yield str(error)
            continue
        for part, x, y in (("model", old[0], new[0]), ("trainer", old[1], new[1])):
            if wrong := list(_unequal_nodes(x, y)):
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                yield f"checkpoints/{name}: {part} {wrong[0]}{more} differ"


def _arrays(store: Path) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Axes and values of every array by its path; empty where there is no store."""
    if not store.exists():
        return {}
    import zarr

    members = open_store(store).members(max_depth=None)
    found: dict[str, Any] = {name: node for name, node in members if isinstance(node, zarr.Array)}
    return {
        name: (tuple(node.metadata.dimension_names), np.asarray(node[...])) for name, node in found.items()
    }


def _unequal_nodes(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """The places in a nest of dicts and lists where it differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if key in CLOCKS:
                continue
            if key not in old or key not in new:
                yield f"{place}/{key}"
            else:
                yield from _unequal_nodes(old[key], new[key], f"{place}/{key}")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for i, (x, y) in enumerate(zip(old, new, strict=True)):
            yield from _unequal_nodes(x, y, f"{place}/{i}")
    elif not _same(old, new):
        yield place


def _same(old: Any, new: Any) -> bool:
    """Equal in kind and in every bit, but that nan is nan."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        alike = (old.dtype, old.shape) == (new.dtype, new.shape)
        return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (old, new)))
    return type(old) is type(new) and repr(old) == repr(new)


def _bits(array: np.ndarray) -> bytes:
    """The values as they stand in memory, every nan as the same one."""
    return (np.where(np.isnan(array), np.nan, array) if array.dtype.kind == "f" else array).tobytes()
