"""The matrix-product rate: positive, and kept under a key that names all it depends on. No timed tests."""

import json

import pytest
import torch

from ffnlab.nn import rate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(rate.SIZE, "cpu", 32)
    monkeypatch.setattr(rate.measure, "__kwdefaults__", {"budget_s": 0.0})


def test_measured_once_and_read_ever_after(tmp_path, monkeypatch):
    first = rate.cached(tmp_path / "new", CPU, torch.float32)
    assert first > 0
    monkeypatch.setattr(rate, "measure", lambda *_: pytest.fail("measured a second time"))
    assert rate.cached(tmp_path / "new", CPU, torch.float32) == first


def test_another_dtype_or_number_of_threads_is_another_rate(tmp_path):
    rate.cached(tmp_path, CPU, torch.float32)
    rate.cached(tmp_path, CPU, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        rate.cached(tmp_path, CPU, torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads((tmp_path / "matrix_rate.json").read_text())) == 3


@pytest.mark.parametrize("damage", ["", '{"cpu', "[1, 2]", '{"cpu": "fast"}', '{"cpu": null}'])
def test_a_damaged_file_is_measured_anew(tmp_path, damage):
    (tmp_path / "matrix_rate.json").write_text(damage)
    value = rate.cached(tmp_path, CPU, torch.float32)
    assert rate.read(tmp_path / "matrix_rate.json") == {rate.machine(CPU, torch.float32): value}


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert rate.cached(tmp_path / "file", CPU, torch.float32) > 0


def test_the_fastest_is_remembered(tmp_path):
    """A busy machine measures too little; a later, faster measurement replaces it, a slower one does not."""
    assert rate.remember(tmp_path, CPU, torch.float32, 5.0) == 5.0
    assert rate.remember(tmp_path, CPU, torch.float32, 7.0) == 7.0
    assert rate.remember(tmp_path, CPU, torch.float32, 6.0) == 7.0
    assert rate.cached(tmp_path, CPU, torch.float32) == 7.0
