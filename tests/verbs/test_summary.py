"""`ffnlab summary` against nanoGPT's sizing notebook (R5, R6), E60, E61, and its own table."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ffnlab import build
from ffnlab.nn.count import count, total
from ffnlab.verbs import mebibytes, quantity, summary

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GPT2 = (
    "arch=nanogpt",
    "model=small",
    "model.seq_len=1024",
    "model.pad_vocab_to=1",
    "logger=none",
)
NO_BIAS = ("attention.bias=false", "ffn.bias=false", "norm.bias=false", "norm_ffn.bias=false")


def summarised(capsys, *arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    assert summary.run(parser.parse_args([*arguments, "--json"])) == 0
    return json.loads(capsys.readouterr().out)


def test_gpt2_without_biases_as_nanogpt_counts_it(capsys):
    """R5 and R6: parameters and the FLOPs of one forward pass over 1024 tokens, to the last digit."""
    facts = summarised(capsys, *GPT2, *NO_BIAS, "--vocab-size", "50257")
    parts = facts["components"]
    norm = 768  # the notebook counts each norm with the matrices that read it
    assert facts["total"]["parameters"] == 124_337_664
    assert parts["ffn"]["parameters"] + 12 * norm == 12 * 4_719_360
    assert parts["attention"]["parameters"] + 12 * norm == 12 * 2_360_064
    assert parts["norms"]["parameters"] == 25 * norm
    assert facts["total"]["flops_per_token"] * 1024 == 291_648_307_200
    assert parts["ffn"]["flops_per_token"] * 1024 == 12 * 9_663_676_416
    assert parts["attention"]["flops_per_token"] * 1024 == 12 * 8_053_063_680
    assert facts["training_flops_per_token"] * 1024 == 874_944_921_600


def test_gpt2_with_biases(capsys):
    """E60, E61: 12 FFNs of 4,722,432 parameters and 9.44 MFLOP, 45 % of the model; tied head counted once."""
    facts = summarised(capsys, *GPT2, "--vocab-size", "50257")
    assert facts["components"]["ffn"]["parameters"] == 12 * 4_722_432
    assert facts["components"]["ffn"]["flops_per_token"] == 12 * 9_437_184
    assert facts["components"]["head"]["parameters"] == 0
    assert facts["tied"] == [["embed.weight", "head.weight"]]
    assert facts["ffn"]["share_of_parameters"] == pytest.approx(0.455, abs=0.001)
    assert facts["ffn"]["d_ff"] == [3072]


def test_checkpoint_of_adam_is_as_large_as_nanogpt_estimates(capsys):
    """R7: weights and two moments, 12 bytes a parameter: 1.49 GB estimated, 1,542,470,366 bytes on disk."""
    memory = summarised(capsys, *GPT2, *NO_BIAS, "--vocab-size", "50257")["memory"]
    size = memory["weights"] + memory["optimizer"]
    assert size == pytest.approx(1.492e9, rel=0.001)
    assert size == pytest.approx(1_542_470_366, rel=0.04)


def test_a_gated_ffn_names_the_width_it_got_and_the_mlp_it_was_matched_to(capsys):
    facts = summarised(capsys, "ffn=swiglu", "--vocab-size", "300")
    ffn = facts["ffn"]
    assert (ffn["name"], ffn["act"], ffn["match"], ffn["baseline_d_ff"]) == (
        "swiglu",
        "silu",
        "params",
        [512],
    )
    assert 3 * ffn["d_ff"][0] == pytest.approx(2 * 512, rel=0.01)


ARCHS = [f"arch={name}" for name in ("modern", "speedrun", "nanogpt", "llama", "original")]
FFNS = sorted(f"ffn={path.stem}" for path in (CONFIGS / "ffn").glob("*.yaml"))
SHAPES = ["attention=none", "model.order=parallel", "ffn.share=all", "ffn.extra=true"]


ALIKE = {
    f"ffn={name}" for name in ("bilinear", "geglu", "glu", "reglu", "reglu2", "tied_reglu", "paired_init")
}
ALIKE |= {"arch=modern", "arch=original", "ffn=multi", "ffn=paired"}


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(choice, marks=[pytest.mark.slow] if choice in ALIKE else [])
        for choice in (*ARCHS, *FFNS, *SHAPES, "ffn.expansion_by_layer=[1,2,4,8]")
    ],
)
def test_flops_are_those_that_torch_counts(choice):
    """A forward pass under torch's own counter; only gates (a few numbers a head) are not counted."""
    small = ["logger=none", "model.n_layers=4", "model.d_model=64", "model.seq_len=64", "model.dropout=0"]
    roomy = ["ffn.capacity_factor=8"] if choice == "ffn=switch" else []  # counted as if no token were dropped
    cfg, _ = build.compose([choice, *small, *roomy])
    model = build.model(cfg, 320)
    # The counter does not know the fused attention of CPUs, but the products of the plain one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.long))
    expected = 64 * total(count(model, 64).values()).flops_per_token
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.001)


def test_the_table_is_plain_text_without_a_terminal(capsys):
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    arguments = ["arch=nanogpt", "model.n_layers=2", "--vocab-size", "300"]
    assert summary.run(parser.parse_args(arguments)) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    for word in (
        "embedding",
        "attention",
        "ffn",
        "norms",
        "head",
        "total",
        "optimizer (adamw)",
        "activations",
    ):
        assert f"\n{word}" in text
    assert "tied: head.weight is embed.weight" in text


def test_shared_weights_are_named_once(capsys):
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    summary.run(parser.parse_args(["ffn.share=down", "model.n_layers=3", "--vocab-size", "300"]))
    text = capsys.readouterr().out
    assert "tied: blocks.1.ffn.down.weight and 1 more is blocks.0.ffn.down.weight, counted once" in text


def test_widths_by_layer_stand_beside_those_of_the_mlp(capsys):
    layers = ["ffn.expansion_by_layer=[3,6]", "model.n_layers=2", "model.d_model=128", "ffn=swiglu"]
    ffn = summarised(capsys, *layers, "--vocab-size", "300")["ffn"]
    assert (ffn["d_ff"], ffn["baseline_d_ff"]) == ([256, 512], [384, 768])


def test_experts_are_counted_in_all_and_by_what_a_token_meets(capsys):
    facts = summarised(capsys, "ffn=moe", "model.n_layers=1", "--vocab-size", "300")
    router, expert = 8 * 128, 2 * 128 * 256
    assert facts["ffn"]["d_ff"] == [256]
    assert facts["components"]["ffn"]["parameters"] == router + 8 * expert
    assert facts["components"]["ffn"]["active_parameters"] == router + 2 * expert
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    summary.run(parser.parse_args(["ffn=moe", "model.n_layers=1", "--vocab-size", "300"]))
    assert "a token meets 132,096 of its 525,312 parameters" in capsys.readouterr().out


def test_a_model_without_ffn_says_so(capsys):
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    assert (
        summary.run(parser.parse_args(["model.n_layers=2", "model.drop_ffn=[0,1]", "--vocab-size", "300"]))
        == 0
    )
    assert "no FFN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 FLOP"), (999, "999 FLOP"), (9437184, "9.44 MFLOP"), (2e15, "2e+03 TFLOP")]
)
def test_quantities(value, text):
    assert quantity(value, "FLOP") == text


def test_bytes():
    assert mebibytes(437_544) == "0.4 MiB"
    assert mebibytes(20 * 2**30) == "20.0 GiB"


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (["ffn=mlp"], "d_ff 512 (parameters nearest to those of the plain MLP of d_ff 512)"),
        (["ffn=moe"], "d_ff 256 (active parameters nearest to those of the plain MLP of d_ff 512)"),
        (
            ["ffn=moe", "ffn.matched=total"],
            "(total parameters nearest to those of the plain MLP of d_ff 512)",
        ),
        (["ffn=swiglu", "ffn.match=flops"], "(FLOPs nearest to those of the plain MLP of d_ff 512)"),
        (["ffn=paired", "ffn.match=width"], "d_ff 512 (the width of the plain MLP, 512)"),
        pytest.param(
            ["ffn=mlp", "ffn.d_ff=99"],
            "d_ff 99 (given by ffn.d_ff)",
            marks=pytest.mark.filterwarnings("ignore:ffn.d_ff=99 is given"),
        ),
    ],
)
def test_what_a_width_was_matched_to_is_named(options, how, capsys):
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    assert summary.run(parser.parse_args([*options, "model=nano", "--vocab-size", "500"])) == 0
    assert how in capsys.readouterr().out
