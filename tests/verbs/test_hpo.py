"""`ffnlab hpo`: a plan is checked at once; a search survives a kill, a failing and a diverging trial."""

import argparse
import warnings
from pathlib import Path

import pytest

from ffnlab.errors import UserError
from ffnlab.verbs import hpo

optuna = pytest.importorskip("optuna")

# Stands in for train.py: val/loss is (lr - 0.3)^2 at every step; lr above 0.8 fails, below 0.05 diverges.
TRAIN = """
import json, pathlib, sys
given = dict(o.split("=", 1) for o in sys.argv[1:])
out, lr = pathlib.Path(given["out"]), float(given["optim.lr"])
if lr > 0.8:
    sys.exit("no such luck")
out.mkdir(parents=True, exist_ok=True)
with open(out / "metrics.jsonl", "a") as file:
    for step in (0, 10, 20):
        loss = None if lr < 0.05 else (lr - 0.3) ** 2
        row = {"step": step, "val/loss": loss} | ({} if loss is not None else {"val/loss/nonfinite": "nan"})
        file.write(json.dumps(row) + "\\n")
(out / "run.json").write_text(json.dumps({"status": "diverged" if lr < 0.05 else "done"}))
(out / "seen").write_text(" ".join(sys.argv[1:]))
sys.exit(3 if lr < 0.05 else 0)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hpo, "POLL_S", 0.02)
    return tmp_path


def search(text: str) -> int:
    Path("space.yaml").write_text(text)
    parser = argparse.ArgumentParser()
    hpo.add_arguments(parser)
    return hpo.run(parser.parse_args(["space.yaml"]))


def plan(trials: int) -> str:
    return (
        f"study: lr\ntrials: {trials}\nprune_after: null\nfixed: [ffn=mlp]\n"
        "space: {optim.lr: {low: 0.0, high: 1.0}, act: {choices: [relu2, gelu]}}\n"
    )


def test_a_search_goes_on_where_it_stopped(here: Path, capsys: pytest.CaptureFixture[str]):
    assert search(plan(3)) == 0
    assert search(plan(8)) == 0
    study = hpo.open_study(hpo.read_plan(Path("space.yaml")))
    trials = study.get_trials()
    assert [trial.number for trial in trials] == list(range(8))
    for trial in trials:
        lr = trial.params["optim.lr"]
        if lr > 0.8:
            assert trial.state.name == "FAIL"
        elif lr < 0.05:
            assert trial.value == float("inf")
        else:
            assert trial.value == pytest.approx((lr - 0.3) ** 2)
            seen = (here / f"outputs/lr/trial-{trial.number:04d}/seen").read_text().split()
            assert seen[0] == "ffn=mlp"
            assert f"act={trial.params['act']}" in seen
    best = min((t for t in trials if t.value is not None), key=lambda t: t.value)
    assert f"best: python train.py ffn=mlp optim.lr={best.params['optim.lr']}" in capsys.readouterr().out


def test_a_search_in_parts_is_the_search_in_one_go(here: Path):
    def drawn(name: str, *trials: int) -> list[dict[str, object]]:
        for n in trials:
            search(plan(n).replace("study: lr", f"study: {name}"))
        return [t.params for t in hpo.open_study(hpo.read_plan(Path("space.yaml"))).get_trials()]

    whole = drawn("whole", 12)  # beyond the ten that are drawn at random
    assert len({params["optim.lr"] for params in whole}) == 12
    assert drawn("parts", 1, 2, 11, 12) == whole


def test_what_was_reported_before_a_kill_is_not_reported_again(here: Path):
    Path("space.yaml").write_text(plan(1))
    left = hpo.open_study(hpo.read_plan(Path("space.yaml"))).ask()
    left.suggest_float("optim.lr", 0.2, 0.4)
    left.report(0.5, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(plan(1).replace("low: 0.0, high: 1.0", "low: 0.2, high: 0.4"))
    (trial,) = hpo.open_study(hpo.read_plan(Path("space.yaml"))).get_trials()
    assert trial.intermediate_values[10] == 0.5


def test_a_trial_that_a_kill_left_running_is_taken_up_again(here: Path):
    Path("space.yaml").write_text(plan(1))
    study = hpo.open_study(hpo.read_plan(Path("space.yaml")))
    left = study.ask()
    lr = left.suggest_float("optim.lr", 0.0, 1.0)  # what a killed search had decided
    assert search(plan(1)) in (0, 1)
    trials = hpo.open_study(hpo.read_plan(Path("space.yaml"))).get_trials()
    assert len(trials) == 1
    assert trials[0].params["optim.lr"] == lr
    assert trials[0].state.name != "RUNNING"


def test_a_worse_trial_is_stopped_early(here: Path):
    slow = TRAIN.replace(
        'file.write(json.dumps(row) + "\\n")',
        (
            'file.write(json.dumps(row) + "\\n"); file.flush(); import time; '
            "time.sleep(0.3 if lr > 0.5 else 0)"
        ),
    )
    (here / "train.py").write_text(slow)
    text = "study: p\ntrials: 4\nprune_after: 1\nspace: {optim.lr: {choices: [0.3, 0.7]}}\n"
    assert search(text) == 0
    states = {
        (t.params["optim.lr"], t.state.name)
        for t in hpo.open_study(hpo.read_plan(Path("space.yaml"))).get_trials()
    }
    assert states <= {(0.3, "COMPLETE"), (0.7, "COMPLETE"), (0.7, "PRUNED")}


def test_all_that_is_wrong_with_a_plan_is_said(here: Path):
    with pytest.raises(UserError) as error:
        search(
            "study: ../x\ntrials: 0\ntrails: 3\nfixed: ffn=mlp\n"
            "space: {a: {low: 1, high: 0}, b: 3, c: {choices: []}, d: {low: 0, high: 1, log: true}}\n"
        )
    assert len(error.value.problems) == 8
    assert any("Did you mean 'trials'" in p for p in error.value.problems)
    with pytest.raises(UserError, match="does not hold a search"):
        search("- 1\n")
    with pytest.raises(UserError, match=r"nosuch\.yaml is not there: `ffnlab hpo --help` shows"):
        hpo.read_plan(Path("nosuch.yaml"))
    with pytest.raises(UserError, match=r"^\. cannot be read: Is a directory$"):
        hpo.read_plan(Path())
