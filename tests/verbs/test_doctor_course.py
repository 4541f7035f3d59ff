"""`ffnlab doctor RUN`: courses made by hand with a symptom at a known step, and a run that was trained."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.stats import linregress

from ffnlab import build, cli
from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import load_config, read_info
from ffnlab.run import run
from ffnlab.verbs.doctor import course, trend
from ffnlab.verbs.doctor.finding import Finding

TINY = ["data=counting", "tokenizer.vocab_size=300", "logger=none", "model.n_layers=2", "model.d_model=32"]
TINY += ["model.n_heads=2", "model.seq_len=32", "train.batch_size=8", "train.precision=fp32"]
STEPS = np.arange(1, 401)
NOISE = 0.03 * np.random.default_rng(0).standard_normal(400)
CFG = {"optim": {"lr": 0.01}, "train": {"clip": 1.0, "grad_accum": 1}}
HEALTHY = 2 + 3.7 * np.exp(-STEPS / 100) + NOISE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 80 updates, its rows and its checkpoint."""
    out = tmp_path_factory.mktemp("runs") / "trained"
    fast = ["train.steps=80", "train.eval_every=40", "train.eval_batches=2", "probe.scan_tokens=512"]
    run(*build.compose([*TINY, *fast, "probe.tokens=32", f"out={out}"]))
    return out


@pytest.fixture
def checked(tmp_path: Path, trained: Path) -> Callable[..., dict[str, Finding]]:
    """checked(loss, norm=..., at={step: {key: value}}) -> what is found in such a record, by check."""

    def check(loss: np.ndarray, norm: np.ndarray | None = None, at: dict | None = None) -> dict[str, Finding]:
        metrics = Metrics(tmp_path / "metrics.jsonl")
        norm = np.ones(len(loss)) if norm is None else norm
        for step, (value, size) in enumerate(zip(loss, norm, strict=True), 1):
            row = {"step": step, "train/loss": value, "optim/lr": 0.01, "optim/grad_norm": size}
            metrics.append(row | (at or {}).get(step, {}))
        metrics.close()
        return {finding.check: finding for finding in course.check(tmp_path, load_config(trained))}

    return check


def began(finding: Finding) -> int:
    """The step that a finding names."""
    return int(finding.where.rpartition("step ")[2])


def test_a_healthy_course_has_no_symptom(checked):
    evaluations = {step: {"val/loss": HEALTHY[step - 1] + 0.02} for step in range(100, 401, 100)}
    found = checked(HEALTHY, at=evaluations)
    assert {name: f.verdict for name, f in found.items()} == dict.fromkeys(
        [
            "not finite",
            "train/loss falls",
            "loss noise / first loss",
            "loss spikes",
            "gradient norm / its past",
            "val loss above lowest",
            "val above train loss",
        ],
        "ok",
    )


def test_nan_at_a_step(checked):
    loss = HEALTHY.copy()
    loss[[76, 90]] = math.nan
    found = checked(loss)["not finite"]
    assert (found.where, found.verdict, found.measured) == ("step 77", "bad", "train/loss is nan")
    assert "optim.lr=0.01 (half of now)" in found.remedy
    assert "train.clip=" in found.remedy


def test_a_run_that_was_stopped_for_nan(checked, tmp_path):
    """A step that is stopped writes no row: run.json tells."""
    (tmp_path / "run.json").write_text(
        json.dumps({"status": "diverged", "diverged": "step 58: the gradient norm is inf (loss 3.1)"})
    )
    found = checked(HEALTHY[:57])["not finite"]
    assert (found.where, found.measured) == ("step 58", "the gradient norm is inf")


def test_a_plateau_begins_where_the_fall_ends(checked):
    found = checked(np.interp(STEPS, [1, 150], [5.7, 3.0]) + NOISE)["train/loss falls"]
    assert found.verdict == "look"
    assert found.measured.startswith("plateau")
    assert abs(began(found) - 150) <= trend.window(400)
    assert "optim.weight_decay=0" in found.remedy


def test_a_plateau_at_a_rate_of_nearly_zero_is_not_judged_by_its_flat_rows():
    """At the end of the run, while its rate is 0, the loss creeps up; before that it falls."""
    loss = np.interp(STEPS, [1, 300, 400], [5.7, 3.0, 3.3]) + NOISE
    lr = np.where(STEPS <= 300, 0.01, 0.0)
    assert trend.falling(STEPS.astype(float), loss, lr, CFG).verdict == "ok"
    assert trend.falling(STEPS.astype(float), loss, np.ones(400), CFG).verdict == "look"


def test_a_loss_that_never_falls(checked):
    found = checked(5.7 + NOISE)["train/loss falls"]
    assert (found.verdict, found.where) == ("bad", "step 1")


def test_a_loss_that_comes_back_up(checked):
    loss = np.interp(STEPS, [1, 200, 300], [5.7, 3.0, 5.0]) + NOISE
    found = checked(loss)["train/loss falls"]
    assert found.verdict == "bad"
    assert abs(began(found) - 200) <= trend.window(400)


@pytest.mark.parametrize(("size", "verdict"), [(0.4, "look"), (1.5, "bad")])
def test_an_oscillation(checked, size, verdict):
    swing = np.where(STEPS >= 240, size * (-1.0) ** STEPS, 0.0)
    found = checked(HEALTHY + swing)["loss noise / first loss"]
    assert found.verdict == verdict
    assert abs(began(found) - 240) <= trend.window(400)


def test_loss_noise_is_the_sd_of_white_noise(checked):
    """E57: of x - (mean of w rows around it), whose variance is s^2 (1 - 1/w)."""
    found = checked(HEALTHY)["loss noise / first loss"]
    expected = NOISE[200:].std() * math.sqrt(1 - 1 / trend.window(400))
    assert found.value * HEALTHY[0] == pytest.approx(expected, rel=0.05)


def test_a_spike(checked):
    loss = HEALTHY.copy()
    loss[[179, 299]] += 1.5
    found = checked(loss)["loss spikes"]
    assert (found.value, found.where, found.verdict) == (2, "step 180", "look")


@pytest.mark.parametrize(("sds", "spikes"), [(5, 0), (7, 1)])
def test_a_spike_is_six_standard_deviations(sds, spikes):
    """1.4826 times the median absolute deviation is the sd of a normal distribution."""
    loss = 5 + 0.1 * np.random.default_rng(1).standard_normal(400)
    loss[200] = 5 + 0.1 * sds
    assert trend.spikes(STEPS.astype(float), loss, CFG).value == spikes


def test_a_falling_line_has_no_noise():
    """Not at its end either, where the window is cut off."""
    assert trend.noise(STEPS.astype(float), np.linspace(6, 1, 400), CFG).value < 1e-9


def test_the_past_of_a_block_is_without_it():
    found = trend.gradient(np.arange(1.0, 11), np.repeat([1.0, 50.0], 5), CFG)
    assert (found.value, began(found)) == (50, 6)


@pytest.mark.parametrize(("rate", "verdict", "step"), [(0.05, "bad", 247), (0.015, "look", 354)])
def test_an_exploding_gradient(checked, rate, verdict, step):
    """exp(rate (k - 200)) is 10 at k = 200 + 2.303 / rate."""
    found = checked(HEALTHY, norm=np.exp(rate * np.maximum(STEPS - 200, 0)))["gradient norm / its past"]
    assert found.verdict == verdict
    assert abs(began(found) - step) <= 8  # a block of rows
    assert "train.clip" in found.remedy


def test_a_vanishing_gradient(checked):
    found = checked(HEALTHY, norm=np.where(STEPS > 250, 1e-6, 1.0))["gradient norm / its past"]
    assert (found.verdict, began(found)) == ("look", 251)


def test_a_layer_that_died():
    """L00 is alive at 100 and 200 and dead from 300 on; L01 was dead at first and came back."""
    fractions = {100: (0.01, 0.95), 200: (0.02, 0.1), 300: (0.93, 0.1), 400: (0.97, 0.1)}
    rows = [
        {"step": step, **{f"probe/activity/L{i:02d}/dead_frac": value for i, value in enumerate(values)}}
        for step, values in fractions.items()
    ]
    dead, alive = course.dead(rows, {"ffn": {}})
    assert (dead.where, dead.verdict, dead.value) == ("L00 since step 300", "bad", 0.97)
    assert (alive.where, alive.verdict) == ("L01", "ok")


def test_an_expert_may_be_silent_on_the_tokens_of_the_others():
    """1 of 64 experts, half of whose neurons are active: 0.8 % in all."""
    rows = [{"step": 1, "probe/activity/L00/active_frac": 0.5 / 64}]
    verdicts = [f.verdict for ffn in ({"n_experts": 64}, {}) for f in course.dead(rows, {"ffn": ffn})]
    assert verdicts == ["ok", "look"]


def test_overfitting(checked):
    values = {100: 3.5, 200: 3.0, 300: 3.6, 400: 4.8}
    found = checked(HEALTHY, at={step: {"val/loss": value} for step, value in values.items()})
    rise, gap = found["val loss above lowest"], found["val above train loss"]
    assert (rise.value, rise.where, rise.verdict) == (pytest.approx(0.6), "since step 200", "bad")
    assert (gap.verdict, gap.where) == ("look", "since step 200")  # 3.0 against 2.5
    assert gap.value == pytest.approx((4.8 - HEALTHY[-9:].mean()) / 4.8, abs=0.01)


def test_a_short_course_says_that_it_is_short(checked):
    assert checked(HEALTHY[:20])["trends"].measured == "too short: 20 rows"


def test_the_slope_is_that_of_least_squares():
    blocks = HEALTHY[:240].reshape(trend.BLOCKS, -1).mean(1)
    expected = linregress(np.arange(trend.BLOCKS), blocks)
    assert trend.slope(HEALTHY[:240]) == pytest.approx(expected.slope / expected.stderr)


def test_a_trained_run_is_well(trained, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert cli.main(["doctor", "--json", str(trained)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["subject"] == "trained: mlp with relu2, 2 layers x 32, after 80 updates, fp32 on cpu"
    assert [f for f in report["findings"] if f["verdict"] == "bad"] == []
    checks = {f["check"] for f in report["findings"]}
    assert {"train/loss falls", "dead layer: dead_frac", "val loss above lowest", "dead neurons"} <= checks
    arrives = [f for f in report["findings"] if f["check"] == "gradient arrives"]
    assert {f["measured"] for f in arrives} == {"step 81"}
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert read_info(trained)["status"] == "done"


def test_a_run_without_a_checkpoint_is_examined_as_it_started(trained, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text((trained / "config.yaml").read_text())
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert "at initialisation, fp32 on cpu (no checkpoint yet)" in capsys.readouterr().out


def test_code_of_other_packages_runs_only_where_it_is_named(trained, tmp_path, capsys):
    cfg = load_config(trained) | {"plugins": ["theirs"]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(cfg))
    assert cli.main(["doctor", str(tmp_path)]) == 1
    assert "if you trust them: --plugins theirs" in capsys.readouterr().err
