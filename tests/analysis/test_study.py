"""What a study's figures.py reads and writes, from run directories made by hand."""

import csv
import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from ffnlab.analysis.conclude import conclude
from ffnlab.analysis.study import Study, arms_of, opened, script
from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics

TRAIN = {"steps": 2, "batch_size": 1, "grad_accum": 1}
YAML = "hydra: {sweeper: {params: {seed: 'range(0,3)'}, arms: {a: [], b: [threshold=learned]}}}\n"


def command(arm: str, seed: int, *further: str) -> list[str]:
    """What run.json says of a job of the sweep."""
    own = {"a": [], "b": ["threshold=learned"]}[arm]
    words = [
        "--config-path",
        "/x=y/configs",
        "experiment=study",
        "logger=none",
        "hydra.mode=RUN",
        f"seed={seed}",
    ]
    return [
        "/x/train.py",
        *words,
        *own,
        f"arm='{arm}'",
        "out='o'",
        "study='study'",
        "train.threads=1",
        *further,
    ]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a study of two arms and three seeds; arm b is 0.5 higher, and has a threshold."""
    monkeypatch.chdir(tmp_path)
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
            (run / "run.json").write_text(json.dumps(info | {"command": command(arm, seed)}))
            metrics = Metrics(run / "metrics.jsonl")
            layer = {"probe/activity/L00/active_frac": 0.1 * (seed + 1)}
            layer |= {"probe/threshold/L00/c": 1.0 + seed} if arm == "b" else {}
            for step in (0, 2):
                metrics.append({"step": step, "val/loss": 3.0 + 0.01 * seed + higher - step / 10, **layer})
            metrics.close()
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/study.yaml").write_text(YAML)
    folder = tmp_path / "experiments/study"
    folder.mkdir(parents=True)
    return folder


def trial(path: Path, *overrides: str) -> None:
    """Makes of a run one with other settings."""
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info | {"command": [*info["command"], *overrides]}))


def of(study: Path, out: Path | None = None) -> Study:
    return opened(study, Path("outputs/study"), out)


def test_results_of_a_study(study: Path, capsys: pytest.CaptureFixture[str]):
    comparison = conclude(of(study), "a")
    assert comparison.question.baseline == "a"
    text = (study / "results/comparison.md").read_text()
    assert "+0.5000" in text
    assert "6 runs of 2 steps of 8 tokens; commit 0123456789" in text
    rows = list(csv.DictReader((study / "results/layers.csv").open()))
    b = next(row for row in rows if row["arm"] == "b")
    assert float(b["c"]) == pytest.approx(2.0)
    assert float(b["c_sd"]) == pytest.approx(np.std([1, 2, 3], ddof=1))
    assert float(b["active_frac"]) == pytest.approx(0.2)
    assert len(list(csv.DictReader((study / "results/runs.csv").open()))) == 6
    assert (study / "results/dots.png").stat().st_size < 300_000
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"experiments/study/results/{path}" for path in (
        "comparison.md", "runs.csv", "layers.csv", "dots.png"
    )]  # fmt: skip


def test_a_part_of_a_study_is_drawn(study: Path, capsys: pytest.CaptureFixture[str]):
    """Arms and seeds may be missing, the baseline among them."""
    for name in ("a-s0", "a-s1", "a-s2", "b-s1"):
        shutil.rmtree(Path("outputs/study") / name)
    assert conclude(of(study), "a").question.baseline == "b"
    assert "no run of the arm 'a' yet: compared with 'b'" in capsys.readouterr().err
    assert len(list(csv.DictReader((study / "results/runs.csv").open()))) == 2


def test_runs_of_other_settings_write_no_results(study: Path, capsys: pytest.CaptureFixture[str]):
    every = sorted(Path("outputs/study").iterdir())
    trial(every[0], "train.steps=2", "probe.every=1")
    kept = of(study)
    assert [run.path for run in kept.runs] == every[1:]
    assert "left out 1 runs with other settings than the study's: train.steps=2\n" in capsys.readouterr().err
    for run in every[1:]:
        trial(run, "+model.d_model=8")
    with pytest.raises(UserError) as error:
        of(study)
    (said,) = error.value.problems
    assert "none of its 6 runs has the study's own settings" in said
    assert "made with train.steps=2 +model.d_model=8" in said
    assert "python experiments/study/figures.py outputs/study --out DIR" in said
    assert not (study / "results").exists()
    with pytest.raises(UserError, match="own settings"):
        of(study, study / "results")
    conclude(of(study, Path("elsewhere")), "a")
    assert Path("elsewhere/dots.png").exists()
    assert not (study / "results").exists()


def test_runs_of_another_command_are_no_runs_of_the_study(study: Path):
    for run in Path("outputs/study").iterdir():
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(info | {"command": ["train.py", "threshold=learned"]}))
    with pytest.raises(UserError, match="made with no experiment=study threshold=learned"):
        of(study)


def test_twins_are_named_without_an_option_that_is_not_there(study: Path):
    shutil.copytree("outputs/study/a-s0", "outputs/study/a-twin")
    with pytest.raises(UserError, match="leave one out; they differ in nothing"):
        _ = of(study).arms


def test_a_study_that_was_not_run_says_how_to(study: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.rmtree("outputs/study")
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    with pytest.raises(SystemExit, match=r"figures\.py: outputs/study does not exist: .* experiment=study"):
        script(str(study / "figures.py"), "about", lambda _: None)


def test_a_study_of_which_nothing_is_done_yet(study: Path):
    for run in Path("outputs/study").iterdir():
        (run / "run.json").write_text('{"status": "running"}')
    with pytest.raises(UserError, match="none of 6 runs is done"):
        conclude(of(study), "a")


def test_the_spread_of_seed_noise(study: Path, root: Path):
    main = runpy.run_path(str(root / "experiments/seed_noise/figures.py"))["main"]
    main(of(study))
    (row, _) = csv.DictReader((study / "results/spread.csv").open())
    assert (row["arm"], row["runs"]) == ("a", "3")
    assert float(row["sd"]) == pytest.approx(0.01)
    for name in ("a-s0", "a-s1", "b-s0", "b-s1"):
        shutil.rmtree(Path("outputs/study") / name)
    with pytest.raises(UserError, match="no arm has two finished runs"):
        main(of(study))


def test_the_time_that_the_sparse_way_saves(study: Path, root: Path, capsys: pytest.CaptureFixture[str]):
    """Of runs with one second a step, and with half of it from the second step on."""
    folder = Path("outputs/payoff")
    for arm, seed in (("c_dense", 0), ("c_auto", 0), ("relu_auto", 0), ("c_dense", 1)):
        run = shutil.copytree(f"outputs/study/a-s{seed}", folder / f"{arm}-s{seed}")
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"arm": arm}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "metrics.jsonl").unlink()
        metrics = Metrics(run / "metrics.jsonl")
        later = 0.5 if arm == "c_auto" else 1.0
        for step in range(5):
            spent = step if step < 1 else 1 + later * (step - 1)
            row = {"step": step, "time_s": spent, "perf/sparse_frac": step / 4, "val/loss": 3 - step / 10}
            metrics.append(row | {"probe/activity/L00/active_frac": 0.5 - step / 10})
        metrics.close()
    for arm, threads in (("relu2_dense", 1), ("relu2_auto", 2)):  # timed on unequal terms
        run = shutil.copytree(folder / "c_dense-s0", folder / f"{arm}-s0")
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"arm": arm}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        info = json.loads((run / "run.json").read_text()) | {"threads": threads}
        (run / "run.json").write_text(json.dumps(info))
    found = opened(study, folder, Path("elsewhere"))
    runpy.run_path(str(root / "experiments/sparsity_payoff/figures.py"))["main"](found)
    said = capsys.readouterr().err
    assert "left out c of seed 1: one of the two is not done" in said
    assert "left out relu2 of seed 0: other threads: 1 and 2" in said
    (row,) = csv.DictReader(
        Path("elsewhere/payoff.csv").read_text().splitlines()
    )  # of the one pair that is whole
    expected = {"start": 0.5, "end": 0.1, "sparse_frac": 1, "dense_s": 4, "auto_s": 2.5, "ratio": 1.6}
    expected |= {"late_ratio": 2, "dense_loss": 2.6, "auto_loss": 2.6, "dense_loss_then": 2.75}
    assert {key: float(row[key]) for key in expected} == pytest.approx(expected)
    assert Path("elsewhere/payoff.png").exists()
    assert Path("elsewhere/density.png").exists()


def test_what_selected_tokens_have_in_common(study: Path, root: Path):
    """The part of chance is taken out layer by layer, and the layers are taken together in the square."""
    for run in Path("outputs/study").glob("a-s*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["model"] = config.get("model", {}) | {"d_model": 128}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "metrics.jsonl").unlink()
        metrics = Metrics(run / "metrics.jsonl")
        for step in range(2):
            row: dict[str, float] = {"step": step, "val/loss": 3.0}
            for layer, shift in (("L00", 0.5), ("L01", 0.13)):
                row |= {f"probe/activity/{layer}/active_frac": 0.5 - 0.2 * step}
                row |= {f"probe/selection/{layer}/shift": shift * (1 + step)}
                row |= {f"probe/selection/{layer}/chance_shift": 0.3 if layer == "L00" else 0.05}
            metrics.append(row)
        metrics.close()
    runpy.run_path(str(root / "experiments/threshold/figures.py"))["main"](of(study))
    (row,) = csv.DictReader((study / "results/selection.csv").open())  # the other arm did not record it
    assert (row["arm"], row["seeds"]) == ("a", "3")
    expected = {"active_start": 0.5, "active_end": 0.3, "start": math.sqrt((0.4**2 + 0.12**2) / 2)}
    expected |= {"expected": 0.0707, "end": math.sqrt((1.0 - 0.3**2 + 0.26**2 - 0.05**2) / 2), "start_sd": 0}
    assert {key: float(row[key]) for key in expected} == pytest.approx(expected, rel=1e-3)


def test_every_study_of_the_repository_has_its_figures(root: Path):
    for file in root.glob("configs/experiment/*.yaml"):
        folder = root / "experiments" / file.stem
        runpy.run_path(str(folder / "figures.py"))  # what it imports is there; nothing is read
        assert arms_of(folder)
