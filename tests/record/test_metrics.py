"""metrics.jsonl: order, numbers, torn lines, full disks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics


def test_order_and_plain_numbers(tmp_path: Path):
    metrics = Metrics(tmp_path / "m")
    metrics.append(
        {
            "moe/L00/load_entropy": 1,
            "probe/activity/L00/active_frac": np.float32(0.5),
            "mine": None,
            "perf/step_ms": 2,
            "optim/lr": torch.tensor(0.25),
            "val/loss": 2.0,
            "train/loss": np.float64(1.5),
            "time_s": 0.1,
            "tokens": np.int64(7),
            "step": 1,
        }
    )
    text = (tmp_path / "m").read_text()
    assert text == (
        '{"step": 1, "tokens": 7, "time_s": 0.1, "train/loss": 1.5, "val/loss": 2.0, "optim/lr": 0.25, '
        '"perf/step_ms": 2, "probe/activity/L00/active_frac": 0.5, "moe/L00/load_entropy": 1, "mine": null}\n'
    )


def test_values_that_are_not_finite_survive(tmp_path: Path):
    metrics = Metrics(tmp_path / "m")
    metrics.append({"step": 1, "train/loss": math.nan, "a": torch.tensor(math.inf), "b": np.float32(-np.inf)})
    raw = json.loads((tmp_path / "m").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert raw == {
        "step": 1, "train/loss": None, "train/loss/nonfinite": "nan",
        "a": None, "a/nonfinite": "inf", "b": None, "b/nonfinite": "-inf",
    }  # fmt: skip
    (row,) = metrics.read()
    assert math.isnan(row.pop("train/loss"))
    assert row == {"step": 1, "a": math.inf, "b": -math.inf}


def test_every_row_is_there_at_once_and_a_torn_one_is_dropped(tmp_path: Path):
    path = tmp_path / "m"
    metrics = Metrics(path)
    for step in range(5):
        metrics.append({"step": step, "x": step / 3})
        assert len(path.read_text().splitlines()) == step + 1
    metrics.close()
    path.write_bytes(path.read_bytes() + b'{"step": 5, "x"')
    assert [row["step"] for row in Metrics(path).read()] == [0, 1, 2, 3, 4]
    again = Metrics(path)
    again.append({"step": 5, "x": 5 / 3})
    assert again.read() == [{"step": step, "x": step / 3} for step in range(6)]
    again.sync()


def test_truncate(tmp_path: Path):
    metrics = Metrics(tmp_path / "m")
    metrics.truncate(3)
    assert not (tmp_path / "m").exists()
    assert metrics.read() == []
    for step in range(6):
        metrics.append({"step": step})
    whole = (tmp_path / "m").read_bytes()
    metrics.truncate(9)
    assert (tmp_path / "m").read_bytes() == whole
    metrics.truncate(2)
    metrics.append({"step": 3})
    assert [row["step"] for row in metrics.read()] == [0, 1, 2, 3]


def test_a_broken_line_inside_is_named(tmp_path: Path):
    (tmp_path / "m").write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a metrics row"):
        Metrics(tmp_path / "m").read()


def test_full_disk_ends_with_a_whole_row(disk):
    path = disk("size=16k") / "m"
    metrics = Metrics(path)
    row = {f"key{i}": 0.123456789 for i in range(50)}

    def until_full() -> None:
        for step in range(1000):
            metrics.append({"step": step, **row})

    with pytest.raises(UserError, match=r"the disk is full: [\d,]+ bytes to write"):
        until_full()
    assert path.read_bytes().endswith(b"}\n")
    assert len(metrics.read()) > 5
