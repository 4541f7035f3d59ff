"""neurons.zarr as xarray, an independent reader, sees it."""

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import xarray
import zarr

from ffnlab.errors import UserError
from ffnlab.record.neurons import NeuronRecord, chunk


def fill(record: NeuronRecord, steps, layers: int = 2, d_ff: int = 8) -> None:
    for step in steps:
        for layer in range(layers):
            record.add(
                step, f"L{layer:02}/activity/active_frac", value(step, layer, d_ff + layer), ("neuron",)
            )
            trace = value(step, layer, 3 * (d_ff + layer)).reshape(3, -1).astype(np.float16)
            record.add(step, f"L{layer:02}/trace/preact", trace, ("token", "neuron"))


def value(step: int, layer: int, n: int) -> np.ndarray:
    return (np.arange(n) + 100 * layer + step).astype(np.float32)


def opened(path: Path, group: str) -> xarray.Dataset:
    return xarray.open_zarr(path, group=group, consolidated=False).load()


def test_xarray_reads_what_was_added(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    for steps in (range(0, 5), range(5, 7), range(10, 200, 10)):
        fill(record, steps)
        record.flush()
    steps = [*range(7), *range(10, 200, 10)]
    for layer in range(2):
        activity = opened(tmp_path / "n.zarr", f"L{layer:02}/activity")
        assert activity.step.values.tolist() == steps
        assert activity.active_frac.dims == ("step", "neuron")
        assert np.array_equal(activity.active_frac.sel(step=30), value(30, layer, 8 + layer))
        trace = opened(tmp_path / "n.zarr", f"L{layer:02}/trace")
        assert trace.preact.dims == ("step", "token", "neuron")
        assert trace.preact.dtype == np.float16
        assert trace.preact.shape == (len(steps), 3, 8 + layer)
        for step in steps:
            assert np.array_equal(
                trace.preact.sel(step=step).values.ravel(), value(step, layer, 3 * (8 + layer))
            )
    tree = xarray.open_datatree(tmp_path / "n.zarr", engine="zarr", consolidated=False)
    assert np.array_equal(tree["L01/activity/active_frac"].sel(step=0), value(0, 1, 9))
    assert zarr.open_group(tmp_path / "n.zarr").metadata.zarr_format == 3


def test_an_array_that_was_not_recorded_at_a_step_has_a_row_there(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    both, one = np.ones(3, np.float32), np.full(3, 2, np.float32)
    for name in ("a", "b"):
        record.add(1, f"L00/x/{name}", both, ("neuron",))
    record.flush()
    record.add(2, "L00/x/a", one, ("neuron",))
    record.flush()
    group = opened(tmp_path / "n.zarr", "L00/x")
    assert group.step.values.tolist() == [1, 2]
    assert np.array_equal(group.a.values, [both, one])
    assert np.array_equal(group.b.values, [both, np.full(3, np.nan)], equal_nan=True)


def test_what_waits_counts_after_a_cut(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    for step in (1, 2):
        record.add(step, "L00/x/a", np.ones(3, np.float32), ("neuron",))
    record.truncate(1)
    assert record.bytes == 12


def test_nothing_is_made_before_the_first_event(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    record.flush()
    record.truncate(3)
    assert not (tmp_path / "n.zarr").exists()


def test_arrays_of_another_rhythm_share_the_steps(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    for step in range(6):
        record.add(step, "L00/a/often", np.full(4, step, np.float32), ("neuron",))
        if step % 3 == 0:
            record.add(step, "L00/a/seldom", np.full(4, step), ("neuron",))
            record.add(step, "L00/a/dead", np.array([True, False, True, False]), ("neuron",))
            record.add(step, "L00/a/rows", np.array([60000], np.uint16), ("one",))
        if step == 3:
            record.flush()
    record.add(4, "L00/a/late", np.float32(2.5)[None][0:1], ("one",))
    record.flush()
    record.add(5, "L00/a/late", np.array([1.5], np.float32), ("one",))  # at a step that lies on the disk
    record.flush()
    data = opened(tmp_path / "n.zarr", "L00/a")
    assert data.step.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.seldom.values[:, 0].tolist() == [0, -1, -1, 3, -1, -1]
    assert data.dead.values[:, 0].tolist() == [1, -1, -1, 1, -1, -1]
    assert data.rows.values[:, 0].tolist() == [60000, -1, -1, 60000, -1, -1]
    assert np.array_equal(data.late.values[:, 0], [np.nan] * 4 + [2.5, 1.5], equal_nan=True)
    assert data.often.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_resume_gives_the_record_of_one_go(tmp_path: Path):
    whole = NeuronRecord(tmp_path / "whole.zarr", 1.0)
    fill(whole, range(0, 150))
    whole.flush()
    parts = NeuronRecord(tmp_path / "parts.zarr", 1.0)
    fill(parts, range(0, 40))
    parts.flush()
    fill(parts, range(40, 90))
    parts.flush()
    fill(parts, range(90, 95))  # never written: killed
    for back, until in ((60, 120), (119, 150)):
        parts = NeuronRecord(tmp_path / "parts.zarr", 1.0)
        parts.truncate(back)
        fill(parts, range(back + 1, until))
        parts.flush()
    for group in ("L00/activity", "L01/trace"):
        assert opened(tmp_path / "parts.zarr", group).identical(opened(tmp_path / "whole.zarr", group))
    assert parts.bytes == whole.bytes


def test_fixed_arrays_stand_once_and_survive(tmp_path: Path):
    """They are no part of the budget, of what a resume cuts, or of what its second writing changes."""
    tokens, edges = np.arange(12, dtype=np.int32).reshape(3, 4), np.linspace(-1, 1, 5, dtype=np.float32)
    for back in (None, 1, -1):
        record = NeuronRecord(tmp_path / "n.zarr", 1.0)
        if back is not None:
            record.truncate(back)
        record.fix("scan/token", tokens, ("window", "position"))
        record.fix("preact/edge", edges, ("edge",))
        fill(record, range(0 if back is None else back + 1, 4))
        record.flush()
        scan = opened(tmp_path / "n.zarr", "scan")
        assert scan.token.dims == ("window", "position")
        assert scan.token.dtype == np.int32
        assert np.array_equal(scan.token, tokens)
        assert np.array_equal(opened(tmp_path / "n.zarr", "preact").edge, edges)
        assert opened(tmp_path / "n.zarr", "L00/trace").step.values.tolist() == [0, 1, 2, 3]
        per_step = sum(4 * (8 + layer) + 2 * 3 * (8 + layer) for layer in range(2))
        assert record.bytes == NeuronRecord(tmp_path / "n.zarr", 1.0).bytes == 4 * per_step


@pytest.mark.parametrize(
    ("shape", "dims", "chunks"),
    [
        ((3072,), ("neuron",), (32, 3072)),
        ((128, 3072), ("token", "neuron"), (32, 128, 128)),
        ((3072, 20), ("neuron", "rank"), (32, 409, 20)),
        ((1024, 1024), ("row", "column"), (1, 1024, 1024)),
        ((0,), ("neuron",), (32, 1)),
    ],
)
def test_chunks_hold_some_steps_of_some_neurons(shape: tuple, dims: tuple, chunks: tuple):
    dtype = np.float16 if "token" in dims else np.float32
    assert chunk(np.zeros(shape, dtype), dims) == chunks
    assert np.prod(chunks) * dtype().itemsize <= 2**20 or chunks[0] == 1


def test_truncate_also_drops_what_waits(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    fill(record, range(4))
    record.truncate(1)
    record.flush()
    assert opened(tmp_path / "n.zarr", "L00/trace").step.values.tolist() == [0, 1]


def test_steps_cannot_go_back_without_truncate(tmp_path: Path):
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    fill(record, (0, 10))
    record.flush()
    fill(record, (5,))
    with pytest.raises(ValueError, match="step 5 comes after step 10"):
        record.flush()


@pytest.mark.parametrize(
    ("name", "dims"), [("flat", ("neuron",)), ("L00/a/step", ("neuron",)), ("L00/a/x", ())]
)
def test_names_and_axes_are_checked(tmp_path: Path, name: str, dims: tuple):
    with pytest.raises(ValueError, match="one name per axis"):
        NeuronRecord(tmp_path / "n.zarr", 1.0).add(0, name, np.zeros(3), dims)


def test_a_kill_during_a_flush_is_mended_by_truncate(tmp_path: Path):
    path = tmp_path / "n.zarr"
    fixed = np.arange(5, dtype=np.int32)
    record = NeuronRecord(path, 1.0)
    fill(record, range(0, 20))
    record.flush()
    for count in itertools.count(1):
        child = os.fork()
        if child == 0:
            _kill_at_write(count)
            again = NeuronRecord(path, 1.0)
            again.truncate(19)
            fill(again, range(20, 40))
            again.fix("scan/token", fixed, ("position",))
            again.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            break
    assert count > 20  # every write of the flush was the last one once
    mended = NeuronRecord(path, 1.0)
    mended.fix("scan/token", fixed, ("position",))
    mended.truncate(19)
    fill(mended, range(20, 30))
    mended.flush()
    whole = NeuronRecord(tmp_path / "whole.zarr", 1.0)
    fill(whole, range(0, 30))
    whole.flush()
    for group in ("L00/activity", "L00/trace", "L01/activity", "L01/trace"):
        assert opened(path, group).identical(opened(tmp_path / "whole.zarr", group))
    assert np.array_equal(opened(path, "scan").token, fixed)


def _kill_at_write(count: int) -> None:
    """Die after the file of the `count`-th write is half written."""
    from zarr.storage import _local

    real, left = _local._put, [count]

    def put(path, value, exclusive=False):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, value, exclusive)

    _local._put = put


def test_budget(tmp_path: Path):
    gib = 1024**3
    record = NeuronRecord(tmp_path / "n.zarr", 3200 / gib)

    def past_it() -> None:
        for step in range(20):
            record.add(step, "L00/a/x", np.zeros(100, np.float32), ("neuron",))

    with pytest.warns(UserWarning, match=r"has reached probe.budget_gib=2.98e-06 at step 8") as caught:
        past_it()
    assert len(caught) == 1
    record.flush()
    assert opened(tmp_path / "n.zarr", "L00/a").sizes == {"step": 8, "neuron": 100}
    assert NeuronRecord(tmp_path / "n.zarr", 1.0).bytes == 3200


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ffnlab.record.neurons._BUFFER_BYTES", 1000)
    record = NeuronRecord(tmp_path / "n.zarr", 1.0)
    fill(record, range(50))
    assert (tmp_path / "n.zarr").exists()
    record.flush()
    assert opened(tmp_path / "n.zarr", "L01/trace").step.values.tolist() == list(range(50))


def test_full_disk(disk):
    record = NeuronRecord(disk("size=256k") / "n.zarr", 1.0)
    record.add(0, "L00/a/x", np.random.default_rng(0).random(200_000), ("neuron",))
    with pytest.raises(UserError, match=r"n.zarr: the disk is full: 1,600,000 bytes to write"):
        record.flush()
