"""A run directory, as analysis reads it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ffnlab import foreign
from ffnlab.errors import UserError, unknown
from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import load_config, read_info
from ffnlab.record.store import open_store

LAYER = re.compile(r"L\d{2,}\w*")  # L03, L03_extra


class Run:
    """One run, finished or not: its configuration, its facts, its metrics, what its neurons did.

    Everything is read when it is asked for, and once.
    """

    def __init__(self, path: Path):
        """Raises UserError when `path` is not a run directory."""
        self.path = Path(path)
        self.config: dict[str, Any] = load_config(self.path)
        self.info: dict[str, Any] = read_info(self.path)

    @property
    def name(self) -> str:
        """The directory's name, which titles say."""
        return self.path.resolve().name

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; empty when there is none."""
        file = self.path / "metrics.jsonl"
        return Metrics(file).read() if file.exists() else []

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of a metric, where it was recorded; both empty when it never was."""
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def keys(self, pattern: str) -> list[str]:
        """The names of all metrics that match a whole regular expression, in order of their appearance."""
        found = dict.fromkeys(key for row in self.rows for key in row)
        return [key for key in found if re.fullmatch(pattern, key)]

    @cached_property
    def groups(self) -> list[str]:
        """The groups of arrays in neurons.zarr: 'L03/activity', 'probe_batch', ..., sorted."""
        root = self.path / "neurons.zarr"
        if not root.exists():
            return []
        import zarr

        with reading(self):
            members = dict(open_store(root).members(max_depth=None))
        return sorted(
            {name.rpartition("/")[0] for name, node in members.items() if isinstance(node, zarr.Array)}
        )

    def layers(self, group: str) -> list[str]:
        """The layers that recorded a group: layers('trace') = ['L00', 'L11']."""
        return [
            layer
            for layer, _, own in (name.partition("/") for name in self.groups)
            if own == group and LAYER.fullmatch(layer)
        ]

    def neurons(self, group: str) -> xr.Dataset:
        """The arrays of a group, labelled and lazy, by step where they have one.

        Raises UserError when the run did not record it.
        """
        if group not in self.groups:
            raise UserError(f"{self.path}: {unknown('record', group, self.groups)}")
        try:
            data = self._open(group)
        except ValueError:  # arrays of unequal length: a run writes just now, or was killed while it did
            data = self._whole(group)
        return data.isel(step=data.step.values >= 0) if "step" in data and (data.step < 0).any() else data

    def _open(self, group: str, **options: Any) -> xr.Dataset:
        root = self.path / "neurons.zarr"
        return xr.open_zarr(root, group=group, consolidated=False, chunks=None, zarr_format=3, **options)

    def _whole(self, group: str) -> xr.Dataset:
        """The steps that all arrays of a group have."""
        store: Any = open_store(self.path / "neurons.zarr")
        lengths = {name: array.shape[0] for name, array in store[group].arrays()}
        steps = slice(min(lengths.values()))
        apart = [self._open(group, drop_variables=set(lengths) - {name}) for name in lengths]
        return xr.merge(part.isel(step=steps) for part in apart)

    @cached_property
    def texts(self) -> dict[int, str]:
        """The text of every token of the probe batch and of the scan, by its id; empty for data without
        one.
        """
        file = self.path / "tokens.json"
        if not file.exists():
            return {}
        try:
            return {
                int(token): str(text) for token, text in foreign.read_json(file, self.path)["text"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} does not hold the texts of tokens ({error}): move it away") from None


@contextmanager
def reading(run: Run) -> Iterator[None]:
    """Within it a damaged file of the record is what the user can mend, not our bug."""
    try:
        yield
    except (RuntimeError, json.JSONDecodeError) as error:  # of zarr's codecs, of its metadata
        raise UserError(
            f"{run.path / 'neurons.zarr'} is damaged ({error}): `ffnlab verify {run.path}` says where"
        ) from error
