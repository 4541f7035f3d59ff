"""What a study's figures.py writes, from run directories made by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from ffnlab.analysis.study import conclude, runs_of, script
from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics

TRAIN = {"steps": 2, "batch_size": 1, "grad_accum": 1}


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Two arms, three seeds; arm b is 0.5 higher, and has a threshold."""
    for arm, higher in (("a", 0.0), ("b", 0.5)):
        for seed in range(3):
            run = tmp_path / f"outputs/study/{arm}-s{seed}"
            run.mkdir(parents=True)
            config = {
                "seed": seed,
                "data": {"seed": seed},
                "arm": arm,
                "train": TRAIN,
                "model": {"seq_len": 8},
            }
            (run / "config.yaml").write_text(yaml.safe_dump(config))
            info = {"status": "done", "git": {"commit": "0123456789ab"}, "threads": 2, "precision": "fp32"}
            (run / "run.json").write_text(json.dumps(info))
            metrics = Metrics(run / "metrics.jsonl")
            layer = {"probe/activity/L00/active_frac": 0.1 * (seed + 1)}
            layer |= {"probe/threshold/L00/c": 1.0 + seed} if arm == "b" else {}
            for step in (0, 2):
                metrics.append({"step": step, "val/loss": 3.0 + 0.01 * seed + higher, **layer})
            metrics.close()
    return tmp_path / "outputs"


def test_results_of_a_study(outputs: Path, tmp_path: Path):
    study = tmp_path / "study"
    study.mkdir()
    comparison = conclude(study, "a", outputs)
    assert comparison.question.baseline == "a"
    text = (study / "results/comparison.md").read_text()
    assert "+0.5000" in text
    assert "6 runs; commit 0123456789" in text
    rows = list(csv.DictReader((study / "results/layers.csv").open()))
    b = next(row for row in rows if row["arm"] == "b")
    assert float(b["c"]) == pytest.approx(2.0)
    assert float(b["c_sd"]) == pytest.approx(np.std([1, 2, 3], ddof=1))
    assert float(b["active_frac"]) == pytest.approx(0.2)
    assert len(list(csv.DictReader((study / "results/runs.csv").open()))) == 6
    assert (study / "results/dots.png").stat().st_size < 300_000
    assert {arm: len(runs) for arm, runs in runs_of(study, outputs).items()} == {"a": 3, "b": 3}


def test_a_study_that_was_not_run_says_how_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=r"python train\.py experiment=study"):
        runs_of(tmp_path / "study", tmp_path / "outputs")
    with pytest.raises(SystemExit, match="experiment=study"):
        script(lambda: runs_of(tmp_path / "study", tmp_path / "outputs"))
