"""`ffnlab sparsify` and `ffnlab ablate` against the same changes made to the weights by hand."""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ffnlab import build
from ffnlab.cache import cache_dir
from ffnlab.device import choose_device, has_bf16
from ffnlab.errors import UserError
from ffnlab.intervene import Activity, acts, changed, collected, risen
from ffnlab.nn.count import count, total
from ffnlab.record.checkpoint import save
from ffnlab.record.table import read_table, write_table
from ffnlab.trained import Trained, place
from ffnlab.verbs import ablate, sparsify
from ffnlab.verbs.sparsify import cuts

SMALL = (
    "data=counting",
    "model.n_layers=2",
    "model.d_model=32",
    "model.n_heads=2",
    "model.seq_len=32",
    "model.zero_out=false",
    "train.device=cpu",
    "train.precision=fp32",
    "logger=none",
)


def make_run(path: Path, *overrides: str) -> Path:
    """A run directory with an untrained model whose output projections are not 0."""
    cfg, _ = build.compose([*SMALL, *overrides])
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(cfg))
    model = build.model(cfg, build.dataset(cfg, cache_dir()).vocab_size)
    torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    save(path, 1, model.state_dict(), {}, keep_last=1)
    return path


def call(verb: Any, run: Path, *options: str) -> list[dict[str, Any]]:
    """The verb's exit code is 0; the rows of its table."""
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    assert verb.run(parser.parse_args([str(run), "--windows", "4", *options])) == 0
    return read_table(run / f"{verb.__name__.rpartition('.')[2]}.csv")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("interventions") / "run", "threshold=fixed", "threshold.init=0.1")


def test_a_higher_c_is_a_higher_c(run: Path):
    rows = call(sparsify, run, "--method", "c", "--fracs", "0.1")
    (together,) = (r for r in rows if r["method"] == "c" and r["layer"] == "all")
    trained = Trained(run)
    names = ["blocks.0.ffn.act", "blocks.1.ffn.act"]
    windows, _ = trained.data.probe_tokens(4)
    with torch.no_grad(), collected(trained.model, names, "input") as pre:
        trained.model(windows)
    by_hand = copy.deepcopy(trained)
    for block, name in enumerate(names):
        values = torch.cat(pre[name]).flatten().sort().values
        c = values[round(0.9 * len(values)) - 1].item()  # the share 0.1 lies above it
        by_hand.model.blocks[block].ffn.act.threshold.fill_(c)  # type: ignore[union-attr]
    batches = trained.batches(4)
    assert together["loss"] == pytest.approx(by_hand.losses(batches).mean().item(), abs=1e-5)
    assert together["active_frac"] == pytest.approx(0.1, abs=0.03)
    assert together["rise"] == pytest.approx(together["loss"] - rows[0]["loss"], abs=1e-9)


def test_a_c_of_each_neuron_rises_by_the_same(tmp_path: Path):
    """Where every neuron has its own C, what counts is how far a pre-activation lies above it."""
    run = make_run(tmp_path / "run", "threshold=fixed", "threshold.active_frac=0.5", "threshold.scope=neuron")
    trained = Trained(run)
    sites = acts(trained.model)
    for names in sites.values():
        trained.model.get_buffer(f"{names[0]}.threshold").copy_(torch.linspace(-1, 1, 128))
    above, post = cuts.calibration(trained, sites)
    for label, names in sites.items():
        changes = cuts.cut("c", names, above, post, 0.05, 1.0)
        windows, _ = trained.data.probe_tokens(4)
        only = {name: change for name, change in changes.items() if label == "L00"}
        activity = Activity(trained.model)
        with torch.no_grad(), changed(trained.model, only, "input"), activity.on():
            trained.model(windows)
        if label == "L00":
            assert activity.fracs()[label] == pytest.approx(0.05, abs=1e-3)


def test_what_is_put_in_place_of_an_ffn_is_its_mean(run: Path):
    layers = ablate.Layers(trained := Trained(run), 256)
    windows = trained.data.scan_tokens(256)
    with torch.no_grad(), collected(trained.model, ["blocks.1.ffn"], "output") as seen:
        trained.model(windows)
    expected = seen["blocks.1.ffn"][0].mean(0)
    torch.testing.assert_close(layers.mean_branch["blocks.1.ffn"], expected)
    change = layers.without_ffn("L01", mean=True)["blocks.1.ffn"]
    torch.testing.assert_close(change(torch.zeros(2, 3, 32)), expected.expand(2, 3, 32))


def test_neurons_of_experts_are_numbered_through(tmp_path: Path):
    layers = ablate.Layers(Trained(make_run(tmp_path / "run", "ffn=moe")), 64)
    width = layers.width("L00") // 8
    changes = layers.without("L00", torch.tensor([3, 2 * width + 1, 2 * width + 5]), mean=False)
    out = {name.split(".")[4]: change(torch.ones(1, width))[0] for name, change in changes.items()}
    assert {e: (post == 0).nonzero().flatten().tolist() for e, post in out.items()} == {"0": [3], "2": [1, 5]}


def test_least_and_most_active(run: Path):
    parser = argparse.ArgumentParser()
    ablate.add_arguments(parser)
    layers = ablate.Layers(Trained(run), 256)
    scores = layers.scores("L01")
    least, most = ablate.ablations(parser.parse_args([str(run), "--least", "9", "--most", "9"]), layers)
    assert (least.what, most.what) == ("least active 9", "most active 9")
    for out, expected in ((least, scores.sort().values[:9]), (most, scores.sort().values[-9:])):
        off = out.changes["blocks.1.ffn.act"](torch.ones(1, 128))[0] == 0
        assert torch.equal(scores[off].sort().values, expected)


def test_the_standard_error_of_a_rise():
    """sd of 1, 2, 6 is sqrt(7)."""
    losses, base = torch.tensor([2.0, 4.0, 9.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double()
    assert risen(losses, base) == pytest.approx((5, 3, (7 / 3) ** 0.5))
    assert math.isnan(risen(losses[:1], base[:1])[2])


@pytest.mark.parametrize(
    ("ffn", "per_pair"),
    [
        # products of training per (token, neuron) pair, each 2 d_model FLOPs: three of down, and for gated
        # units three of up; of the matrix that gives the pre-activations two, its forward product is dense
        ("ffn=mlp act=relu2", 5),
        ("ffn=mlp act=gelu", 5),
        ("ffn=swiglu", 8),
    ],
)
def test_what_could_be_skipped_is_counted_by_pair(tmp_path: Path, ffn: str, per_pair: int):
    run = make_run(tmp_path / "run", *ffn.split())
    rows = call(sparsify, run, "--fracs", "0.1")
    model = Trained(run).model
    cost = total(count(model, 32).values()).flops_per_token
    pairs = len(model.get_parameter("blocks.0.ffn.up.weight"))
    for r in rows:
        layers = 2 if r["layer"] == "all" else 1
        expected = (1 - r["active_frac"]) * layers * pairs * per_pair * 2 * 32 / (3 * cost)
        assert r["skippable_frac"] == pytest.approx(expected, rel=1e-9)
    assert any(r["skippable_frac"] > 0.1 for r in rows if r["method"] == "top_k")


def test_means_of_half_precision_are_those_of_fp32(tmp_path: Path):
    """A sum in bf16 would be 8 bits long."""
    trained = Trained(make_run(tmp_path / "run", "act=silu"))
    activity, name = Activity(trained.model), "blocks.0.ffn.act"
    act = trained.model.get_submodule(name)
    pre = torch.randn(999, 128).bfloat16() + 1
    with activity.on():
        post = act(pre).double()
    torch.testing.assert_close(activity.mean(name), post.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(activity.mean_size(name), post.abs().mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(activity.active_frac(name), (post != 0).double().mean(0))


def test_batches_are_of_one_size(run: Path, monkeypatch: pytest.MonkeyPatch):
    trained = Trained(run)
    there = (trained.data.n_val - 1) // 32
    size = next(n for n in (3, 5, 7, 11, 13) if there % n)
    monkeypatch.setattr("ffnlab.trained.WINDOWS_AT_ONCE", size)
    for windows, expected in ((1, [1]), (size, [size]), (10**6, [size] * (there // size))):
        assert [len(x) for x, _ in trained.batches(windows)] == expected


def test_a_run_of_another_machine_can_be_asked(tmp_path: Path):
    cfg = {"train": {"device": "cuda", "precision": "auto"}}
    device, precision = place(cfg, {"precision": "bf16"})
    assert device == choose_device("auto")
    assert precision == ("bf16" if has_bf16(device) else "fp32")
    assert place({"train": {"device": "cpu", "precision": "fp32"}}, {}) == (torch.device("cpu"), "fp32")


def test_shares_that_are_not_below_what_is_active_are_left_out(run: Path):
    rows = call(sparsify, run, "--fracs", "1", "0.9", "0.05")
    assert {r["kept_frac"] for r in rows if r["method"] != "none"} == {0.05}
    assert {r["method"] for r in rows} == {"none", "c", "eps", "top_k"}
    assert [r["layer"] for r in rows if r["method"] == "c"] == ["all", "L00", "L01"]


@pytest.mark.parametrize("k", [1, 5, 128])
def test_top_k_and_eps_keep_what_is_largest(k: int):
    post = torch.randn(7, 128, dtype=torch.float64)
    kept = cuts.keep_largest(post, k / 128)
    for row, out in zip(post, kept, strict=True):
        best = sorted(row.tolist(), key=abs)[-k:]
        assert sorted(out[out != 0].tolist(), key=abs) == best
    eps = cuts.quantile(post.abs().flatten(), 1 - k / 128)
    assert torch.count_nonzero(cuts.drop_small(post, eps)) == 7 * k if k < 128 else True


def test_the_knee_is_the_last_before_the_first_bad_one():
    rises = {1.0: 0.0, 0.5: -0.001, 0.3: 0.009, 0.2: 0.02, 0.1: 0.005}
    rows = [{"active_frac": frac, "rise": rise} for frac, rise in rises.items()]
    at = sparsify.knee(rows, 0.01)
    assert at is not None
    assert at["active_frac"] == 0.3
    assert sparsify.knee([{"active_frac": 1.0, "rise": float("nan")}], 0.01) is None


def test_the_summary_says_where_the_knee_is_and_whether_it_was_found():
    def rows(*rises: float) -> list[dict]:
        fracs = (0.5, 0.2, 0.1)
        return [
            {"method": "none" if i == 0 else "c", "active_frac": frac, "rise": rise, "skippable_frac": 0.5}
            for i, (frac, rise) in enumerate(zip(fracs, rises, strict=True))
        ]

    assert sparsify.at_knee(rows(0, 0.005, 0.02), 0.01) == ("20.00%", "50.0%")
    assert sparsify.at_knee(rows(0, 0.005, 0.006), 0.01)[0] == "10.00% (lowest tried)"
    assert sparsify.at_knee(rows(0, 0.03, 0.006), 0.01)[0] == "50.00% (as it is)"
    assert sparsify.at_knee(rows(float("nan"), 0, 0), 0.01)[0] == "not finite"


def test_a_summary_is_printed_and_all_is_in_the_table(run: Path, capsys: pytest.CaptureFixture[str]):
    rows = call(sparsify, run)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) < 16
    assert f"all {len(rows)} measurements, with standard errors: {run / 'sparsify.csv'}" in printed
    together = {r["kept_frac"]: r["rise"] for r in rows if (r["method"], r["layer"]) == ("top_k", "all")}
    (line,) = [line for line in printed if line.startswith("top_k all")]
    assert line.split()[-1] == f"{together[0.01]:+.4f}"  # 0.3 to 0.01, every second


def test_what_was_put_in_place_is_on_record(run: Path):
    for words, instead in (((), "zero"), (("--mean",), "mean")):
        assert {r["instead"] for r in call(ablate, run, "--layer", "L00", *words)} == {instead}


def test_a_neuron_that_is_out_is_a_column_of_down_that_is_zero(run: Path):
    rows = call(ablate, run, "--neuron", "L01:3", "--layer", "L00")
    trained = Trained(run)
    batches = trained.batches(4)
    assert rows[0]["loss"] == pytest.approx(trained.losses(batches).mean().item(), abs=1e-6)
    down = trained.model.get_parameter("blocks.1.ffn.down.weight")
    with torch.no_grad():
        down[:, 3] = 0
    assert rows[2]["loss"] == pytest.approx(trained.losses(batches).mean().item(), abs=1e-6)
    other = Trained(run)
    with torch.no_grad():
        other.model.blocks[0].ffn.down.weight.zero_()  # type: ignore[union-attr]
    assert rows[1]["what"] == "ffn"
    assert rows[1]["loss"] == pytest.approx(other.losses(batches).mean().item(), abs=1e-6)


def test_dead_neurons_cost_nothing_and_means_are_put_in_place(run: Path, tmp_path: Path):
    dead = make_run(tmp_path / "run", "threshold=fixed", "threshold.init=1.6")
    rows = {r["what"]: r for r in call(ablate, dead)}
    assert 0 < rows["never active"]["neurons"] < 256
    assert rows["never active"]["rise"] == 0
    trained = Trained(run)
    layers = ablate.Layers(trained, 256)
    changes = layers.without("L00", torch.tensor([5]), mean=True)
    post = torch.zeros(2, layers.width("L00"))
    out = changes["blocks.0.ffn.act"](post)
    assert out[0, 5] == pytest.approx(layers.activity.mean("blocks.0.ffn.act")[5].item())
    assert torch.count_nonzero(out) == 2


@pytest.mark.parametrize(
    "ffn",
    [
        "swiglu",
        "dynamic",
        *(
            pytest.param(ffn, marks=pytest.mark.slow)
            for ffn in ("moe", "switch", "multi", "paired", "dual_path")
        ),
    ],
)
def test_every_kind_of_ffn_can_be_asked(ffn: str, tmp_path: Path):
    run = make_run(tmp_path / "run", f"ffn={ffn}")
    sparse = call(sparsify, run, "--fracs", "0.1")
    assert {"eps", "top_k"} <= {r["method"] for r in sparse}
    for r in sparse:
        if r["method"] == "top_k" and r["layer"] == "all":
            assert r["active_frac"] == pytest.approx(0.1, abs=0.02)
    rows = call(ablate, run, "--least", "2", "--most", "1")
    assert [r["neurons"] for r in rows] == [0, 4, 2]
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in rows)


def test_what_cannot_be_asked_is_said_at_once(run: Path, tmp_path: Path):
    smooth = make_run(tmp_path / "run", "act=gelu")
    with pytest.raises(UserError, match="nowhere exactly 0"):
        call(sparsify, smooth, "--method", "c")
    with pytest.raises(UserError, match="takes up a threshold"):
        call(sparsify, make_run(tmp_path / "quantile", "act=quantile"), "--method", "c")
    with pytest.raises(UserError) as error:
        call(sparsify, run, "--fracs", "0", "1.5", "--tolerance", "0")
    assert len(error.value.problems) == 3
    with pytest.raises(UserError, match="unknown layer 'L07'"):
        call(ablate, run, "--layer", "L07")
    with pytest.raises(UserError, match="0 to 127"):
        call(ablate, run, "--neuron", "L00:128")
    with pytest.raises(UserError, match="has no FFN"):
        call(ablate, make_run(tmp_path / "none", "ffn=none"))


def test_tables_come_back_as_they_were(tmp_path: Path):
    rows = [{"a": 'x,"y"\n', "b": 1.5}, {"a": "L00", "b": float("nan")}]
    write_table(tmp_path / "t.csv", ("a", "b"), rows)
    back = read_table(tmp_path / "t.csv")
    assert [r["a"] for r in back] == [r["a"] for r in rows]
    assert back[0]["b"] == 1.5
    assert back[1]["b"] != back[1]["b"]
