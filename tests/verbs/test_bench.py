"""`ffnlab bench`: its arithmetic and its words on the smallest models; nothing depends on speed."""

import argparse
import csv
import json

import pytest
import torch

from ffnlab import build
from ffnlab.device import has_bf16
from ffnlab.errors import UserError
from ffnlab.nn import rate
from ffnlab.nn.count import TRAINING, count, total
from ffnlab.verbs import bench
from ffnlab.verbs.bench.steps import Bench, Times

SMALL = ("model.n_layers=1", "model.d_model=16", "model.seq_len=8", "train.batch_size=2", "logger=none")


@pytest.fixture(autouse=True)
def _small_products(monkeypatch):
    monkeypatch.setitem(rate.SIZE, "cpu", 32)


def benched(capsys, *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert bench.run(parser.parse_args(arguments)) == 0
    return capsys.readouterr().out


def test_train_reports_fp32_and_the_optimizers_apart(capsys):
    text = benched(
        capsys, "train", *SMALL, "--vocab-size", "300", "--rounds", "2", "--precision", "fp32", "--json"
    )
    facts = json.loads(text)
    fp32 = facts["fp32"]
    assert set(fp32["optimizer_ms"]) == {"BatchedMuon", "AdamW"}
    assert fp32["tok_per_s"] == pytest.approx(16 / fp32["step_ms"] * 1e3)
    assert min(fp32["forward_ms"], fp32["backward_ms"], fp32["mfu"], fp32["matrix_rate_flops_per_s"]) > 0


@pytest.mark.skipif(not has_bf16(torch.device("cpu")), reason="this processor has no bf16")
def test_train_compares_both_precisions_in_a_table(capsys):
    text = benched(capsys, "train", *SMALL, "optim=adamw", "--vocab-size", "300", "--rounds", "1")
    for word in ("forward", "backward", "AdamW", "tokens/s", "fraction of that rate"):
        assert word in text
    assert "bf16 is " in text


def test_figures_are_medians_of_the_rounds():
    """Worked out by hand from three steps and three rates."""
    cfg, _ = build.compose(SMALL)
    made = Bench(cfg, 300, torch.device("cpu"), "fp32")
    made.times = [Times(t, t / 4, t / 2, {"AdamW": t / 8}) for t in (1.0, 4.0, 2.0)]
    made.rates = [1e6, 1e6, 2e6]
    figures = made.figures()
    flops = TRAINING * total(count(made.model, 8).values()).flops_per_token * 16
    assert figures["step_ms"] == 2000
    assert (figures["forward_ms"], figures["backward_ms"], figures["rest_ms"]) == (500, 1000, 250)
    assert figures["optimizer_ms"] == {"AdamW": 250}
    assert figures["optimizer_frac"] == 0.125
    assert figures["tok_per_s"] == 8
    assert figures["flops_per_s"] == flops / 2
    assert figures["mfu"] == pytest.approx(flops * 0.25 / 1e6)


def test_a_benched_step_trains():
    """It is the step of training: the loss on its batch falls, and the gradients are gone afterwards."""
    cfg, _ = build.compose([*SMALL, "optim=adamw", "optim.lr=0.01"])
    made = Bench(cfg, 300, torch.device("cpu"), "fp32")
    (x, y) = made.micro[0]
    before = made.model.loss(x, y).item()
    for _ in range(3):
        made.step()
    assert made.model.loss(x, y).item() < before
    assert all(p.grad is None for p in made.model.parameters())


def test_gemm_measures_and_keeps_the_rate(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FFNLAB_CACHE", str(tmp_path))
    facts = json.loads(benched(capsys, "gemm", "--device", "cpu", "--json"))
    assert facts["rates"]["float32"]["now_flops_per_s"] > 0
    assert facts["rates"]["float32"]["kept_flops_per_s"] in rate.read(tmp_path / "matrix_rate.json").values()


def test_startup_reads_the_record_of_train_py(capsys, tmp_path, monkeypatch):
    """A stand-in for train.py that writes the row of step 1 and ends."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import pathlib, sys\n"
        "out = pathlib.Path(dict(a.split('=', 1) for a in sys.argv[1:])['out'])\n"
        "out.mkdir()\n"
        '(out / \'metrics.jsonl\').write_text(\'{"step": 0, "a": 1}\\n{"step": 1, "a": 1}\\n\')\n'
    )
    assert json.loads(benched(capsys, "startup", "--json"))["startup_s"] > 0


def test_startup_tells_why_train_py_failed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; sys.exit('the reason')")
    with pytest.raises(UserError, match="the reason"):
        benched(capsys, "startup")


def test_startup_needs_a_checkout(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="this folder has none"):
        benched(capsys, "startup")


def test_probes_report_what_each_costs(capsys):
    text = benched(
        capsys, "probes", *SMALL, "probe=[default,gradients]", "train.steps=30", "train.eval_every=10",
        "probe.tokens=8", "probe.scan_tokens=20", "probe.every_step_until=2", "probe.preact.every=30",
        "--vocab-size", "300", "--rounds", "2", "--json",
    )  # fmt: skip
    facts = json.loads(text)
    found = facts["probes"]
    assert {"forward", "activity", "preact", "gradients"} < set(found)
    looks = {name: found[name]["looks"] for name in ("forward", "preact", "gradients")}
    assert looks == {"forward": 6, "preact": 4, "gradients": 5}
    assert found["activity"]["scans"] == 4
    assert min(found["forward"]["scan_ms"], found["activity"]["scan_ms"], found["gradients"]["look_ms"]) > 0
    taken = {name: r["looks"] * r["look_ms"] + r["scans"] * r["scan_ms"] for name, r in found.items()}
    whole = 30 * facts["step_ms"] + sum(taken.values())
    assert found["activity"]["share"] == pytest.approx(taken["activity"] / whole)


def test_probes_show_a_table(capsys):
    text = benched(capsys, "probes", *SMALL, "probe.tokens=8", "--vocab-size", "300", "--rounds", "1")
    assert "preact" in text
    assert "The probes take " in text


def test_ffns_are_compared_at_matched_parameters(capsys, tmp_path):
    file = tmp_path / "rows.csv"
    text = benched(
        capsys, "ffn", *SMALL, "model.d_model=32", "--variants", "swiglu", "moe", "--acts", "gelu",
        "--rounds", "2", "--tokens", "16", "--csv", str(file), "--json",
    )  # fmt: skip
    rows = json.loads(text)["rows"]
    assert [r["name"] for r in rows if r["section"] == "variants"] == ["mlp", "swiglu", "moe"]
    assert [r["name"] for r in rows if r["section"] == "activations"] == ["mlp gelu", "glu gelu"]
    assert {"one_call", "precision", "checkpointing"} < {r["section"] for r in rows}
    by_name = {r["name"]: r for r in rows}
    mlp, swiglu = by_name["mlp"], by_name["swiglu"]
    assert mlp["time_ratio"] == 1
    assert mlp["parameter_bytes"] == 2 * 4 * 32 * 128
    assert swiglu["parameter_bytes"] == pytest.approx(mlp["parameter_bytes"], rel=0.05)
    assert by_name["moe"]["experts"] == 8
    assert by_name["checkpointed"]["saved_bytes"] < by_name["plain"]["saved_bytes"]
    for row in rows:
        assert min(row["forward_ms"], row["time_ratio"], row["flop_rate_ratio"], row["matrix_rate_frac"]) > 0
        assert row["forward_ms"] <= row["forward_backward_ms"]
        assert row["saved_bytes"] <= row["peak_bytes"]
    with file.open() as written:
        assert [r["name"] for r in csv.DictReader(written)] == [r["name"] for r in rows]


def test_ffn_tables_show_every_section(capsys):
    text = benched(capsys, "ffn", *SMALL, "--variants", "switch", "--rounds", "1", "--tokens", "16")
    for word in ("FFN variants", "E76", "E77", "E78", "switch, 8 experts, top 1"):
        assert word in text


def test_ffn_takes_its_choices_from_its_own_options(capsys):
    with pytest.raises(UserError) as error:
        benched(capsys, "ffn", "ffn=swiglu", "--variants", "swiglo", "--acts", "gello")
    assert len(error.value.problems) == 3
    assert "Did you mean 'swiglu'" in str(error.value)
    with pytest.raises(UserError, match="--tokens 0"):
        benched(capsys, "ffn", "--tokens", "0")


def test_shapes_have_equal_parameters(capsys):
    options = ("--depths", "1", "2", "--rounds", "2", "--tokens", "16")
    rows = json.loads(benched(capsys, "shapes", "model.d_model=64", *SMALL[2:], *options, "--json"))["rows"]
    assert len(rows) == 2
    for layers, row in enumerate(rows, start=1):  # all of it by hand
        d = row["d_model"]
        assert row["parameters"] == layers * (4 * d * d + 2 * d * row["d_ff"])
        assert row["parameters"] == pytest.approx(6 * 12 * 64 * 64, rel=0.01)
        assert row["flops_per_token"] == 2 * row["parameters"] + layers * 4 * 8 * d
    assert rows[0]["d_model"] > rows[1]["d_model"]
    assert all(row["tok_per_s"] > 0 and row["matrix_rate_frac"] > 0 for row in rows)
    with pytest.raises(UserError, match="--depths 0"):
        benched(capsys, "shapes", "--depths", "0", "3")
    with pytest.raises(UserError, match=r"--depths or --params \(the blocks as configured hold 49,152\)"):
        benched(capsys, "shapes", "model.d_model=64", *SMALL[2:], "model.n_layers=1", "--params", "10")
    text = benched(capsys, "shapes", *SMALL, "ffn=none", "--depths", "1", "2", "--rounds", "1")
    assert "No shape within 1 % at 2 layers" in text


def test_rounds_must_be_positive(capsys):
    with pytest.raises(UserError, match="--rounds 0"):
        benched(capsys, "train", *SMALL, "--rounds", "0")
