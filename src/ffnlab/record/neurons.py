"""neurons.zarr: what every neuron did, step by step, in arrays that xarray opens."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ffnlab.record.files import disk_error
from ffnlab.record.store import open_store

_GIB = 1024**3
_CHUNK_EVENTS = 32
_CHUNK_BYTES = 1024**2
_BUFFER_BYTES = 64 * 1024**2

Event = tuple[int, np.ndarray]  # (step, values)


class NeuronRecord:
    """Arrays over steps in a zarr v3 store: `L03/activity/active_frac` is an array (step, neuron) in group
    L03/activity.

    Every group has its own coordinate `step`, but for groups of fixed arrays (`fix`); dimension names are
    stored, so `xarray.open_zarr(path, group="L03/activity", consolidated=False)` works. All arrays of a group
    stand on the same steps: where one was not recorded its row is NaN (-1 for whole numbers; unsigned ones
    and truth values are widened to hold it). Events wait in memory until `flush`, which appends them as one
    block. The store is made by the first flush.
    """

    def __init__(self, path: Path, budget_gib: float):
        self.path = path
        self.budget = int(budget_gib * _GIB)
        self._buffer: dict[str, dict[str, list[Event]]] = {}  # group -> array -> events
        self._fixed: dict[str, np.ndarray] = {}
        self._dims: dict[str, tuple[str, ...]] = {}
        self._waiting = 0
        self._latest = -1
        self._over = False
        self._root: Any = None
        self._open: dict[str, dict[str, Any]] = {}  # group -> zarr arrays: opening them is half of a flush
        self.bytes = self._stored_bytes()  # of all values, before compression

    def add(self, step: int, name: str, array: np.ndarray, dims: tuple[str, ...]) -> None:
        """Record `array` of `step`; `dims` names its axes. Steps must not fall within a group.

        Past the budget nothing more is recorded, with one warning: a record must not stop a training that
        runs.
        """
        group, _, key = name.rpartition("/")
        if not group or key == "step" or len(dims) != array.ndim or "step" in dims:
            raise ValueError(
                f"{name} {array.shape} {dims}: want group/array, one name per axis, none of them 'step'"
            )
        if self._waiting > _BUFFER_BYTES and step > self._latest:
            self.flush()
        array = np.array(
            array, dtype=np.promote_types(array.dtype, np.int8) if array.dtype.kind in "bu" else None
        )
        if self._over or self.bytes + array.nbytes > self.budget:
            return self._stop(step)
        self._dims[name] = tuple(dims)
        self._buffer.setdefault(group, {}).setdefault(key, []).append((step, array))
        self._latest = max(self._latest, step)
        self._waiting += array.nbytes
        self.bytes += array.nbytes

    def fix(self, name: str, array: np.ndarray, dims: tuple[str, ...]) -> None:
        """Record an array that stays the same over the run, outside the budget; where it stands already,
        nothing changes. Its group holds no arrays over steps.
        """
        self._dims[name] = tuple(dims)
        self._fixed[name] = array

    def flush(self) -> None:
        """Append the waiting events to the store. Raises UserError when the disk is full or read-only."""
        try:
            for name, array in self._fixed.items():
                self._write_fixed(name, array)
            for group, events in self._buffer.items():
                self._append(group, events)
        except OSError as error:
            raise disk_error(self.path, self._waiting, error) from error
        self._buffer, self._waiting, self._fixed = {}, 0, {}

    def truncate(self, step: int) -> None:
        """Drop everything after `step`: a resume goes on from there. Mends a store that a kill left
        half-appended.
        """
        for events in self._buffer.values():
            for key, rows in events.items():
                events[key] = [row for row in rows if row[0] <= step]
        if self.path.exists():
            for left in self.path.rglob("*.partial"):  # of a write that a kill ended
                left.unlink(missing_ok=True)
            for arrays in self._by_step():
                steps = arrays["step"][:]
                keep = int(((steps >= 0) & (steps <= step)).sum())
                for array in arrays.values():
                    array.resize((keep, *array.shape[1:]))
        self._waiting = sum(
            a.nbytes for events in self._buffer.values() for rows in events.values() for _, a in rows
        )
        self.bytes = self._stored_bytes() + self._waiting
        self._latest = min(self._latest, step)

    def state(self) -> dict[str, Any]:
        """How much of the budget is used, for a checkpoint: rows filled up with NaN do not count, and what
        was stopped stays so.
        """
        return {"bytes": self.bytes, "over": self._over}

    def restore(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`, after `truncate`; an empty one changes nothing."""
        self.bytes, self._over = state.get("bytes", self.bytes), state.get("over", self._over)

    def _append(self, group: str, events: dict[str, list[Event]]) -> None:
        arrays = self._arrays(group)
        if "step" not in arrays:
            arrays["step"] = self._store().create_array(
                f"{group}/step",
                shape=(0,),
                chunks=(4096,),
                dtype="int64",
                fill_value=-1,  # of rows that a kill left without their step
                dimension_names=("step",),
            )
        old = arrays["step"][:]
        found = {step for rows in events.values() for step, _ in rows}
        new = np.array(sorted(found - set(old.tolist())), dtype=np.int64)
        if new.size and old.size and new[0] < old[-1]:
            raise ValueError(f"{group}: step {new[0]} comes after step {old[-1]}; truncate before going back")
        for key, rows in events.items():
            if key not in arrays:
                arrays[key] = self._create(f"{group}/{key}", rows[0][1], len(old))
        steps = np.concatenate([old, new])
        for key, array in arrays.items():
            if key == "step":
                continue
            array.resize((len(steps), *array.shape[1:]))
            block = np.full((len(new), *array.shape[1:]), array.fill_value, dtype=array.dtype)
            for step, values in events.get(key, []):
                place = int(np.searchsorted(steps, step))
                if place < len(old):  # an evaluation at a step that was flushed already
                    array[place] = values
                else:
                    block[place - len(old)] = values
            if len(new):
                array[len(old) :] = block
        arrays["step"].resize((len(steps),))
        arrays["step"][len(old) :] = new

    def _create(self, name: str, sample: np.ndarray, rows: int) -> Any:
        return self._store().create_array(
            name,
            shape=(rows, *sample.shape),
            chunks=chunk(sample, self._dims[name]),
            dtype=sample.dtype,
            fill_value=np.nan if sample.dtype.kind == "f" else -1,
            dimension_names=("step", *self._dims[name]),
        )

    def _write_fixed(self, name: str, array: np.ndarray) -> None:
        group, _, key = name.rpartition("/")
        there = self._arrays(group).get(key)
        if there is None or there.shape != array.shape or not np.array_equal(there[...], array):
            self._open.pop(group)
            self._store().create_array(
                name, data=array, dimension_names=self._dims[name], overwrite=True, chunks=array.shape
            )

    def _store(self) -> Any:
        if self._root is None:
            self._root = open_store(self.path, "a")
        return self._root

    def _arrays(self, group: str) -> dict[str, Any]:
        if group not in self._open:
            self._open[group] = dict(self._store().require_group(group).arrays())
        return self._open[group]

    def _by_step(self) -> list[dict[str, Any]]:
        """The arrays of every group that has steps."""
        import zarr

        members = self._store().members(max_depth=None)
        found = [self._arrays(name) for name, node in members if isinstance(node, zarr.Group)]
        return [arrays for arrays in found if "step" in arrays]

    def _stored_bytes(self) -> int:
        if not self.path.exists():
            return 0
        return sum(
            array.nbytes for arrays in self._by_step() for key, array in arrays.items() if key != "step"
        )

    def _stop(self, step: int) -> None:
        if not self._over:
            self._over = True
            warnings.warn(
                f"{self.path} has reached probe.budget_gib={self.budget / _GIB:.3g} at step {step}: "
                "per-neuron arrays are not recorded any more; scalars and training go on.",
                stacklevel=3,
            )


def chunk(sample: np.ndarray, dims: tuple[str, ...]) -> tuple[int, ...]:
    """The chunks of an array over steps: 32 steps of as many neurons as fit into 1 MiB (fewer steps where no
    axis is called neuron), so that one neuron over all steps and all neurons at one step are quick to read.

    Measured on one core, 600 steps of 3072 neurons, one neuron over all steps and all neurons at one step:
    (step, neuron) float32 50 and 5 ms; (step, token, neuron) float16 with 128 tokens, 0.44 GB on disk, 60 and
    87 ms (whole steps as chunks: 2.1 s and 30 ms).
    """
    sizes = [max(1, size) for size in sample.shape]
    fitting = _CHUNK_BYTES // max(1, sample.nbytes)  # steps
    if "neuron" not in dims:
        return max(1, min(_CHUNK_EVENTS, fitting)), *sizes
    axis = dims.index("neuron")
    column = max(1, sample.nbytes // sizes[axis])
    sizes[axis] = max(1, min(sizes[axis], _CHUNK_BYTES // (column * _CHUNK_EVENTS)))
    return _CHUNK_EVENTS, *sizes
