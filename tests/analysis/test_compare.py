"""`ffnlab compare`: which runs are one arm, what is refused, warned of and counted, and what is printed."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats as reference

from ffnlab import cli
from ffnlab.analysis import compared
from ffnlab.analysis.arms import Seed, find, group
from ffnlab.analysis.compare import compare
from ffnlab.analysis.contrasts import counted
from ffnlab.analysis.dots import paired_dots
from ffnlab.errors import UserError
from ffnlab.record.metrics import Metrics

Make = Callable[..., Path]
FINAL = {  # arm -> val/loss by seed
    "plain": [4.100, 4.050, 4.160, 4.010, 4.090, 4.120],
    "good": [4.071, 4.018, 4.133, 3.979, 4.059, 4.092],
    "same": [4.101, 4.049, 4.161, 4.010, 4.089, 4.121],
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a run directory as training would: make("a", seed=1, loss=4.0, arm="x", config={...}, ...)."""

    def write(
        name: str,
        seed: int = 0,
        loss: float = 4.0,
        arm: str | None = None,
        status: str = "done",
        config: dict | None = None,
        **info: object,
    ) -> Path:
        path = tmp_path / "study" / name
        path.mkdir(parents=True)
        cfg = {
            "seed": seed,
            "arm": arm,
            "out": str(path),
            "train": {"steps": 200, "batch_size": 4, "grad_accum": 1, "threads": 1},
            "model": {"seq_len": 64},
            "optim": {"lr": 0.02},
            "data": {"seed": seed},
        }
        for key, value in (config or {}).items():
            *above, last = key.split(".")
            node = cfg
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
        facts = {
            "status": status,
            "parameters": 1000,
            "flops_per_token": 3000,
            "skippable_flops_per_token": {"L00": 400, "L01": 800},
            "vocab_size": 300,
            "data": {"fingerprint": "abc"},
            "precision": "fp32",
            "threads": 1,
            "timings": {"median_tok_per_s": 5000.0 + seed},
        }
        (path / "config.yaml").write_text(yaml.safe_dump(cfg))
        (path / "run.json").write_text(json.dumps(facts | info))
        metrics = Metrics(path / "metrics.jsonl")
        for step, value in ((0, 6.0), (100, 5.0), (200, loss)):
            active = {"probe/activity/L00/active_frac": 0.5, "probe/activity/L01/active_frac": 0.25}
            row = {"step": step, "tokens": 256 * step, "time_s": step / 10, "val/loss": value}
            metrics.append(row | {"val/bits_per_byte": value / 2} | active)
        metrics.close()
        return path

    return write


@pytest.fixture
def study(make: Make, tmp_path: Path) -> Path:
    """Three arms of six seeds."""
    for arm, losses in FINAL.items():
        for seed, loss in enumerate(losses):
            info: dict = {"created": f"2026-01-01T00:00:0{list(FINAL).index(arm)}"}
            if arm == "same":
                info["token_share"] = {"L00": 1.0, "L01": 0.5}
            make(f"{arm}-s{seed}", seed=seed, loss=loss, arm=arm, **info)
    return tmp_path / "study"


def verb(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints."""
    assert cli.main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_verdicts_differences_and_costs(study: Path):
    found = compare([study])
    assert found.question.baseline == "plain"  # begun first
    good, same = found.analysis.contrasts["good"], found.analysis.contrasts["same"]
    assert (good.verdict, same.verdict) == ("better", "equivalent")
    assert good.difference == pytest.approx(np.mean(FINAL["good"]) - np.mean(FINAL["plain"]))
    assert good.p_flips == good.p_flips_smallest == 2 / 2**6
    assert found.warnings == []
    cost = found.costs["good"]
    assert (cost.parameters, cost.flops_per_token, cost.tok_per_s) == (1000, 3000, 5002.5)
    assert cost.active_frac == pytest.approx(0.375)
    assert cost.skippable_flops_per_token == pytest.approx(0.5 * 400 + 0.75 * 800)
    assert cost.skippable_frac == pytest.approx(800 / 9000)
    assert cost.baseline_steps is not None
    assert cost.baseline_steps.beyond
    experts = found.costs["same"]  # L01: 4 experts, top 2, of which 0.25 / 0.5 of the neurons are active
    assert experts.skippable_flops_per_token == pytest.approx(0.5 * 400 + 0.5 * 800)
    own = found.costs["plain"].to_loss
    assert own is not None
    assert (own.steps, own.seconds, own.flops, own.reached) == (200, 20.0, 3 * 3000 * 256 * 200, 6)
    crossing = [100 + 100 * (5 - p) / (5 - g) for p, g in zip(FINAL["plain"], FINAL["good"], strict=True)]
    assert cost.to_loss is not None
    assert cost.to_loss.steps == pytest.approx(np.median(crossing))
    assert cost.to_loss.seconds == pytest.approx(np.median(crossing) / 10)


def test_a_worse_arm_is_worth_fewer_baseline_steps_and_a_target_may_be_given(study: Path):
    found = compare([study], baseline="good", target=4.06)
    plain = found.costs["plain"]
    assert found.analysis.contrasts["plain"].verdict == "worse"
    assert plain.baseline_steps is not None
    assert not plain.baseline_steps.beyond
    assert 190 < plain.baseline_steps.step < 200
    assert plain.to_loss is not None
    assert (plain.to_loss.reached, plain.to_loss.of, plain.to_loss.steps) == (2, 6, float("inf"))
    assert "- (2 of 6)" in next(row for row in compared.spent(found).cells() if row[0] == "plain")


def test_a_difference_that_is_real_and_small_is_said_to_be_both(study: Path):
    assert compare([study], margin=0.05).analysis.contrasts["good"].verdict == "better, within margin"


def test_the_direction_is_known_for_losses_only(study: Path):
    found = compare([study], metric="probe/activity/L00/active_frac")
    assert found.question.margin is None
    assert found.analysis.contrasts["good"].verdict == "no verdict (residual 0)"  # one number everywhere
    assert found.costs["good"].to_loss is None
    halved = compare([study], metric="val/bits_per_byte")
    assert halved.analysis.contrasts["good"].verdict == "better"


def test_undecided_says_how_many_seeds_would_decide(make: Make, study: Path):
    rng = np.random.default_rng(0)
    for seed in range(6):
        make(f"noisy-s{seed}", seed=seed, loss=float(4.09 + rng.normal(0, 0.03)), arm="noisy", created="3")
    found = compare([study]).analysis
    noisy = found.contrasts["noisy"]
    assert noisy.seeds_needed is not None
    assert noisy.seeds_needed > 6
    assert noisy.verdict == f"undecided (6 seeds, power 0.8 needs {noisy.seeds_needed})"


def test_missing_seeds_stay_paired_and_one_seed_has_no_verdict(make: Make, study: Path):
    for seed in (0, 3, 4):
        make(f"few-s{seed}", seed=seed, loss=FINAL["plain"][seed] - 0.05, arm="few")
    make("one-s0", seed=0, loss=3.0, arm="one")
    found = compare([study], baseline="plain")
    few, one = found.analysis.contrasts["few"], found.analysis.contrasts["one"]
    assert (few.seeds, few.method, few.verdict) == (3, "paired", "better")
    assert few.difference == pytest.approx(-0.05, abs=0.001)
    assert few.p_flips is None
    assert (one.method, one.verdict, one.p) == ("none", "no verdict (n = 1)", None)
    assert one.difference == pytest.approx(3.0 - FINAL["plain"][0])  # of the seed that both have
    said = "no verdict on one: 1 seed in common with the baseline; a verdict among 5 arms takes 3"
    assert said in compared.notes(found)


def test_few_seeds_or_no_residual_give_no_verdict_and_say_what_would(make: Make, tmp_path: Path):
    """Differences of 2 seeds in the thousandths, whose p would be 0.01, and such as do not scatter at all."""
    runs = {"a": [4.000, 4.1, 4.2, 4.3], "b": [4.100, 4.202, 4.301, 4.40], "copy": [5.000, 5.1, 5.2, 5.3]}
    for arm, losses in runs.items():
        for seed, loss in enumerate(losses):
            make(f"{arm}-s{seed}", seed=seed, loss=loss, arm=arm, created=arm)

    def of(n: int, *arms: str) -> compared.Comparison:
        return compare([tmp_path / f"study/{arm}-s{seed}" for arm in arms for seed in range(n)])

    for n, freedom in ((2, ""), (3, " (2 degrees of freedom)")):
        found = of(n, "a", "b")
        contrast = found.analysis.contrasts["b"]
        assert (contrast.verdict, contrast.p, contrast.low) == (f"no verdict (n = {n})", None, None)
        assert contrast.difference == pytest.approx(np.mean(np.subtract(runs["b"], runs["a"])[:n]))
        said = (
            f"no verdict on b: {n} seeds in common with the baseline{freedom}; a verdict among 2 arms takes 4"
        )
        assert said in compared.notes(found)
        assert not any("least squares" in line or "sign" in line for line in compared.notes(found))
    assert of(4, "a", "b").analysis.contrasts["b"].verdict == "worse"
    assert of(3, "a", "b", "copy").analysis.contrasts["b"].verdict == "worse"  # 4 degrees of freedom
    found = of(4, "a", "copy")
    assert found.analysis.contrasts["copy"].verdict == "no verdict (residual 0)"
    assert any("on copy: every seed gives the same difference" in line for line in compared.notes(found))


def test_counts_have_a_plural():
    said = [counted(n, what) for n, what in ((1, "seed"), (3, "seed"), (1, "degree of freedom"))]
    assert said == ["1 seed", "3 seeds", "1 degree of freedom"]
    assert counted(2.6, "degree of freedom") == "2.6 degrees of freedom"


def test_runs_that_did_not_learn_are_named_and_counted(make: Make, study: Path):
    make("good-s6", seed=6, loss=6.5, arm="good", created="2026-01-01T00:00:01")
    found = compare([study], baseline="plain")
    assert found.values["good"][Seed(6, 6)] == 6.5
    (line,) = found.warnings
    assert line.startswith("arm 'good', seed 6: val/loss ended at 6.5000, not below its first, 6.0000")
    (study / "good-s6" / "metrics.jsonl").write_text(
        '{"step": 0, "val/loss": NaN}\n{"step": 9, "val/loss": 5.0}\n'
    )
    assert "val/loss is not finite at 1 of 2 steps, the first is 0" in compare([study]).warnings[-1]


def test_without_common_seeds_it_is_welchs_test_and_said(make: Make, study: Path):
    losses = [4.3, 4.2, 4.25]
    for seed, loss in enumerate(losses, 10):
        make(f"far-s{seed}", seed=seed, loss=loss, arm="far")
    found = compare([study], baseline="plain")
    far = found.analysis.contrasts["far"]
    assert (far.seeds, far.method, far.verdict) == (3, "unpaired", "worse")
    assert far.p == pytest.approx(reference.ttest_ind(losses, FINAL["plain"], equal_var=False).pvalue)
    assert any("unpaired (Welch): far" in line for line in compared.notes(found))


def test_diverged_runs_are_counted_and_unfinished_ones_named(make: Make, study: Path):
    make("good-s6", seed=6, loss=float("nan"), arm="good", status="diverged")
    make("good-s7", seed=7, loss=float("nan"), arm="good")
    make("gone-s0", seed=0, loss=9.0, arm="gone", status="diverged")
    make("good-s8", seed=8, arm="good", status="interrupted")
    found = compare([study], baseline="plain")
    assert set(found.values["good"]) == {Seed(s, s) for s in range(6)}
    assert compared.verdict(found, "good") == "better; 2 of 8 diverged"
    assert compared.verdict(found, "gone") == "1 of 1 diverged"
    lines = compared.left_out(found)
    assert lines[0] == "2 of 8 runs of arm 'good' diverged (seed 6, 7): the means are over the others"
    assert "good-s8 (interrupted)" in lines[-1]
    with pytest.raises(UserError, match="all runs of the baseline 'gone' diverged; others: "):
        compare([study], baseline="gone")


def test_one_arm_or_one_run_is_shown_without_a_contrast(make: Make, capsys: pytest.CaptureFixture[str]):
    paths = [make(f"r{seed}", seed=seed, loss=4.0 + seed) for seed in range(3)]
    found = compare(paths)
    assert found.analysis.contrasts == {}
    assert compared.rows(found)[0]["mean"] == 5.0
    assert "baseline: all" in verb(capsys, *paths)
    assert "compare it with the runs of another" in verb(capsys, paths[0])
    assert "4.0000" in verb(capsys, paths[0])
    other = make("other", loss=3.9, config={"optim.lr": 1})
    shown = verb(capsys, paths[0], other)
    assert "no verdict (n = 1)" in shown
    assert "-0.1000" in shown


def test_two_runs_of_one_arm_and_seed_are_refused_with_both_paths(make: Make, study: Path):
    twin = make("twin", seed=2, arm="good", config={"optim.lr": 0.5})
    with pytest.raises(UserError) as error:
        compare([study])
    assert all(part in str(error.value) for part in (str(study / "good-s2"), str(twin), "optim.lr", "--by"))
    assert len(compare([study], by=["arm", "optim.lr"]).arms) == 4


def test_what_cannot_be_compared_is_refused(make: Make, study: Path, tmp_path: Path):
    for arguments, said in (
        ({"metric": "val/los"}, "unknown metric 'val/los'. Did you mean 'val/loss'?"),
        ({"baseline": "plian"}, "unknown arm 'plian'. Did you mean 'plain'?"),
        ({"by": ["optim.ls"]}, "unknown key 'optim.ls'. Did you mean 'optim.lr'?"),
    ):
        with pytest.raises(UserError) as error:
            compare([study], **arguments)
        assert said in str(error.value)
    with pytest.raises(UserError, match="nowhere does not exist"):
        compare([tmp_path / "nowhere", tmp_path])
    running = make("running", status="running")
    with pytest.raises(UserError, match=r"no run is done: .*running \(running\)"):
        compare([running])


def test_other_data_can_be_compared_per_byte_only(make: Make, study: Path):
    make("other-s0", seed=0, arm="other", vocab_size=999, data={"fingerprint": "xyz"})
    with pytest.raises(UserError) as error:
        compare([study])
    assert "vocabulary differs: 300 in plain, good, same; 999 in other" in error.value.problems
    assert "val/bits_per_byte" in error.value.problems[-1]
    found = compare([study], metric="val/bits_per_byte", baseline="plain")
    assert found.warnings == ["data differs: abc in plain, good, same; xyz in other"]


def test_what_is_unfair_is_said(make: Make, study: Path):
    changed = {"train.steps": 300, "train.batch_size": 8, "optim.lr": 0.3}
    make("odd-s6", seed=6, arm="good", config=changed, precision="bf16", threads=4, processes=2)
    warned = compare([study], baseline="plain").warnings
    assert "train.steps differs: 200 in plain, good, same; 300 in good" in warned
    assert "tokens per step differs: 256 in plain, good, same; 1024 in good" in warned
    assert "precision differs: fp32 in plain, good, same; bf16 in good" in warned
    assert "threads differs: 1 in plain, good, same; 4 in good" in warned
    assert any(
        line.startswith("arm 'good' is not one configuration") and "optim.lr" in line for line in warned
    )


def test_an_arm_that_spoils_the_pooled_variance_is_named(make: Make, study: Path):
    for seed in range(6):
        make(f"wild-s{seed}", seed=seed, loss=4.1 + 0.3 * (-1) ** seed, arm="wild", created="3")
    found = compare([study])
    assert list(found.analysis.wild) == ["wild"]
    assert found.analysis.contrasts["good"].verdict.startswith("undecided")
    assert compared.wild(found)[0].startswith("arm 'wild' scatters ")


def test_arms_without_names_are_called_by_what_differs(make: Make):
    def arms(*variants: tuple[dict, dict]) -> list[str]:
        paths = [
            make(f"v{len(made)}", config=config, choices={"probe": f"p{len(made)}", **choices})
            for choices, config in variants
            if made.append(0) is None
        ]
        return [arm.name for arm in group(find(paths))]

    made: list[int] = []
    mlp = ({"ffn": "mlp", "act": "relu2"}, {"ffn._target_": "MLP", "act._target_": "R"})
    glu = ({"ffn": "swiglu", "act": "relu2"}, {"ffn._target_": "SwiGLU", "ffn.x": 1, "act._target_": "R"})
    silu = ({"ffn": "swiglu", "act": "silu"}, {"ffn._target_": "SwiGLU", "ffn.x": 1, "act._target_": "S"})
    assert arms(mlp, glu) == ["ffn=mlp", "ffn=swiglu"]
    assert arms(mlp, glu, silu) == ["ffn=mlp act=relu2", "ffn=swiglu act=relu2", "ffn=swiglu act=silu"]
    fast = (mlp[0], mlp[1] | {"optim.lr": 0.1, "model.softcap": None})
    assert arms(mlp, fast) == ["optim.lr=0.02", "optim.lr=0.1 model.softcap=null"]
    wide = (glu[0], glu[1] | {"ffn.x": 2})
    assert arms(mlp, glu, wide) == ["ffn=mlp", "ffn=swiglu ffn.x=1", "ffn=swiglu ffn.x=2"]
    gpt = ({"arch": "nanogpt", "ffn": "mlp", "act": "gelu"}, {"act._target_": "G", "optim.lr": 0.001})
    modern = ({"arch": "modern", "ffn": "mlp", "act": "relu2"}, {"act._target_": "R"})
    assert arms(modern, gpt) == ["arch=modern", "arch=nanogpt"]
    assert arms(mlp) == ["all"]
    data = [make(f"d{s}", seed=0, config={"data.seed": s}) for s in (0, 1)]
    assert [[str(seed) for seed in arm.runs] for arm in group(find(data))] == [["0", "0/1"]]


def test_every_format_tells_the_same(study: Path, capsys: pytest.CaptureFixture[str]):
    table = verb(capsys, study, "--baseline", "plain")
    markdown = verb(capsys, study, "--baseline", "plain", "--format", "md")
    for text in (table, markdown):
        assert all(
            word in text for word in ("good", "equivalent", "95 % CI", "the smallest possible p is 0.031")
        )
        assert "> 200" in text
        assert "within 0.01 nats per token" in text
    assert "| good | 6 |" in markdown
    assert cli.main(["compare", str(study), "--format", "csv"]) == 0
    shown = capsys.readouterr()
    rows = {row["arm"]: row for row in csv.DictReader(io.StringIO(shown.out))}
    assert "baseline: plain" in shown.err
    facts = json.loads(verb(capsys, study, "--format", "json"))
    good = next(row for row in facts["arms"] if row["arm"] == "good")
    assert (
        float(rows["good"]["difference"])
        == good["difference"]
        == compare([study]).analysis.contrasts["good"].difference
    )
    assert len(facts["runs"]) == 18
    assert facts["residual_df"] == 10


def test_arguments_that_make_no_sense(study: Path, capsys: pytest.CaptureFixture[str]):
    wrong = ["--alpha", "2", "--margin", "0", "--figure", "x.doc", "--target", "nan"]
    assert cli.main(["compare", str(study), *wrong]) == 1
    said = capsys.readouterr().err
    words = ("4 problems", "--alpha 2.0", "--margin 0.0", "x.doc", "--target nan")
    assert all(word in said for word in words)


def test_the_figure_has_a_dot_for_every_run(study: Path, make: Make, capsys: pytest.CaptureFixture[str]):
    make("few-s0", seed=0, arm="few")
    axes = paired_dots(compare([study], baseline="plain")).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 4]
    drawn = np.array([line.get_ydata() for line in lines], dtype=float)
    assert drawn.shape == (6, 4)
    assert sorted(drawn[~np.isnan(drawn)]) == pytest.approx(sorted([*np.ravel([*FINAL.values()]), 4.0]))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["plain", "good", "same", "few"]
    verb(capsys, study, "--baseline", "plain", "--figure", study.parent / "new" / "figure.png")
    assert (study.parent / "new" / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_runs_of_a_real_sweep(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]):
    tiny = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "train.steps=4", "train.eval_every=2"]
    tiny += [
        "data=counting",
        "tokenizer=byte",
        "logger=none",
        "train.eval_batches=2",
        "probe.scan_tokens=256",
    ]
    command = [sys.executable, str(root / "train.py"), "-m", "act=relu2,gelu", "seed=0,1", *tiny]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    facts = json.loads(verb(capsys, tmp_path / "outputs/sweep", "--format", "json"))
    relu2, gelu = facts["arms"]
    assert (relu2["arm"], gelu["arm"], relu2["n"], gelu["n"]) == ("relu2", "gelu", 2, 2)
    assert (facts["baseline"], facts["residual_df"], facts["warnings"]) == ("relu2", 1, [])
    all_products = 2 * 5 * 2 * 16 * 64  # layers, products, 2 D F
    skipped = relu2["skippable_flops_per_token"] / all_products
    assert skipped == pytest.approx(1 - relu2["active_frac"])  # layers are equally wide
    assert gelu["skippable_flops_per_token"] == 0
