"""TensorBoard event files, read back with TensorBoard's own reader."""

import math
from pathlib import Path

import numpy as np
import pytest

from ffnlab.errors import UserError
from ffnlab.record import tensorboard as module
from ffnlab.record.tensorboard import TensorBoardSink


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ffnlab\[tensorboard\]'"):
        TensorBoardSink()


def test_read_back_over_a_resume(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    picture = tmp_path / "f.png"
    picture.write_bytes(b"\x89PNG fake")
    for resumed, steps in ((False, range(0, 6)), (True, range(4, 9))):
        sink = TensorBoardSink()
        sink.start({"path": str(tmp_path), "resumed": resumed}, {})
        for step in steps:
            loss = math.nan if step == 2 else step / 2
            sink.log({"step": step, "train/loss": loss, "n": np.float32(3), "gone": None, "text": "x"})
        sink.histograms(steps[-1], {"h": (np.array([1, 2, 1]), np.array([0.0, 1.0, 2.0, np.inf]))})
        sink.image("figure", picture, steps[-1])
        sink.finish("done", {})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(losses) == list(range(9))
    assert [event.step for event in events.Scalars("n")] == list(range(9))
    assert math.isnan(losses.pop(2))
    assert all(value == step / 2 for step, value in losses.items())
    assert events.Histograms("h")[-1].histogram_value.num == 4
    assert events.Images("figure")[-1].encoded_image_string == b"\x89PNG fake"


def test_finish_before_any_row(tmp_path: Path):
    sink = TensorBoardSink()
    sink.start({"path": str(tmp_path)}, {})
    sink.finish("failed", {})
    assert list(tmp_path.iterdir()) == []
