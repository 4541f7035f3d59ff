"""`ffnlab prune` against the same model with its dead neurons left in."""

import argparse
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from ffnlab import build
from ffnlab.cache import cache_dir
from ffnlab.errors import UserError
from ffnlab.record.checkpoint import save
from ffnlab.record.rundir import load_config, read_info
from ffnlab.trained import Trained
from ffnlab.verbs import prune, sample

SMALL = ["data=counting", "model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.seq_len=32"]
SMALL += ["model.zero_out=false", "train.device=cpu", "train.precision=fp32", "logger=none", "act=relu2"]
DEAD = 70  # neurons of layer 1 that nothing can wake up


def make_run(path: Path, *overrides: str) -> Path:
    """A run whose layer 1 has dead neurons, in between the others."""
    cfg, _ = build.compose([*SMALL, *overrides])
    data = build.dataset(cfg, cache_dir())
    model = build.model(cfg, data.vocab_size)
    torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    state = model.state_dict()
    way_in = "gate" if "blocks.1.ffn.gate.weight" in state else "up"
    state[f"blocks.1.ffn.{way_in}.weight"][::2][:DEAD] = 0  # pre-activation 0: max(0, 0 - C) = 0
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(cfg))
    assert data.tokenizer is not None
    data.tokenizer.save(path / "tokenizer.json")
    save(path, 1, state, {}, keep_last=1)
    return path


def call(run: Path, *options: str) -> Path:
    parser = argparse.ArgumentParser()
    prune.add_arguments(parser)
    args = parser.parse_args([str(run), "--windows", "16", *options])
    assert prune.run(args) == 0
    return args.out or run.with_name(f"{run.name}-pruned")


def logits(run: Path) -> Tensor:
    trained = Trained(run)
    with torch.no_grad():
        return trained.model(trained.batches(4)[0][0])


@pytest.mark.parametrize(
    "own",
    [
        ["ffn=mlp", "threshold=fixed", "threshold.init=0.05"],
        ["ffn=mlp", "threshold=learned", "threshold.scope=neuron", "ffn.bias=[down]"],
        ["ffn=reglu2"],
        ["ffn=tied_reglu"],
    ],
    ids=["mlp", "a C per neuron", "gated", "tied"],
)
def test_the_pruned_model_computes_the_same(tmp_path: Path, own: list[str], capsys: pytest.CaptureFixture):
    run = make_run(tmp_path / "run", *own)
    small = call(run)
    said = capsys.readouterr().out
    torch.testing.assert_close(logits(small), logits(run), rtol=1e-5, atol=1e-5)
    before, after = (Trained(path).model for path in (run, small))
    gone = before.blocks[1]["ffn"].d_ff - after.blocks[1]["ffn"].d_ff
    assert gone >= min(DEAD, before.blocks[1]["ffn"].d_ff // 2)
    assert "rise +0.00000" in said.replace("-0.00000", "+0.00000")
    info = read_info(small)
    assert info["parameters"] == sum(p.numel() for p in after.parameters())
    assert info["pruned_from"]["path"] == str(run)
    assert load_config(small)["ffn"]["match"] == "width"
    sample.load_run(small)


def test_below_takes_out_rare_neurons_too(tmp_path: Path):
    run = make_run(tmp_path / "run", "ffn=mlp", "threshold=fixed", "threshold.active_frac=0.1")
    small = call(run, "--below", "0.5", "--out", str(tmp_path / "tiny"))
    assert Trained(small).model.blocks[0]["ffn"].d_ff < Trained(run).model.blocks[0]["ffn"].d_ff


@pytest.mark.parametrize(
    ("own", "options", "words"),
    [
        (["act=gelu"], [], "GELU is not zero"),
        (["ffn=paired"], [], "do not stand alone"),
        (["ffn=moe"], [], "do not stand alone"),
        (["ffn.share=all"], [], "ffn.share"),
        ([], ["--below", "1"], "--below 1: expected a share"),
        ([], ["--windows", "0"], "--windows 0"),
        ([], ["--windows", "100000000000"], "--windows 100000000000: the training split has"),
        ([], ["--out", "."], "is there already"),
    ],
)
def test_messages(tmp_path: Path, own: list[str], options: list[str], words: str):
    cfg, _ = build.compose([*SMALL, *own])
    run = tmp_path / "run"
    data = build.dataset(cfg, cache_dir())
    model = build.model(cfg, data.vocab_size)
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    save(run, 1, model.state_dict(), {}, keep_last=1)
    with pytest.raises(UserError, match=words):
        call(run, *options)
