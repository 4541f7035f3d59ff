"""`ffnlab export`: the folders, loaded by transformers itself and by a few lines of plain torch."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor

from ffnlab import build
from ffnlab.data.encoders import ByteTokenizer
from ffnlab.errors import UserError
from ffnlab.nn.gpt import GPT
from ffnlab.record.checkpoint import save
from ffnlab.verbs import export

VOCAB, T = 97, 16
TOKENS = torch.randint(0, VOCAB, (3, T), generator=torch.Generator().manual_seed(1))
SMALL = ["model.n_layers=2", "model.d_model=32", "model.n_heads=4", f"model.seq_len={T}"]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, GPT]]:
    """make_run(*overrides) -> a run directory with one checkpoint of a model in which all is random."""

    def make(*overrides: str) -> tuple[Path, GPT]:
        cfg, _ = build.compose([*SMALL, *overrides])
        run = tmp_path / "run"
        run.mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump(cfg))
        (run / "run.json").write_text(json.dumps({"vocab_size": VOCAB}))
        model = build.model(cfg, VOCAB).eval()
        rng = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=rng))
        save(run, 1, model.state_dict(), {}, keep_last=1)
        return run, model

    return make


def exported(run: Path, to: str, *more: str) -> Path:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    assert export.run(parser.parse_args([str(run), "--to", to, *more])) == 0
    return run / "export" / to


def logits(model: GPT) -> Tensor:
    """Over the true vocabulary."""
    with torch.no_grad():
        return model(TOKENS)[..., :VOCAB]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gpt2", ["arch=nanogpt"]),
        (
            "gpt2",
            ["arch=nanogpt", "act=relu", "ffn.expansion=3", "model.tie_head=false", "norm=layernorm_gain"],
        ),
        (
            "gpt2",
            ["arch=nanogpt", "attention.bias=[v]", "ffn.bias=false", "norm=layernorm_plain", "act=relu2"],
        ),
        ("llama", ["arch=llama", "attention.n_kv_heads=2"]),
        ("llama", ["arch=llama", "ffn=geglu", "act=gelu_tanh", "model.tie_head=true", "ffn.bias=[up]"]),
        (
            "llama",
            ["arch=llama", "norm=rmsnorm", "attention.bias=[q]", "attention.rope_base=300", "ffn.share=all"],
        ),
        ("arcee", ["arch=modern", "attention.qk_norm=false", "model.softcap=null"]),
        ("mistral", ["arch=llama", "attention.window=5"]),
    ],
)
def test_transformers_gives_the_same_logits(kind: str, overrides: list[str], make_run) -> None:
    transformers = pytest.importorskip("transformers")
    run, model = make_run(*overrides)
    folder = exported(run, "hf")
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert theirs.config.model_type == kind
    assert not any(told.values())
    with torch.no_grad():
        assert (theirs.eval()(TOKENS).logits - logits(model)).abs().max() < 1e-4


def test_nanogpt_gives_the_same_logits(make_run) -> None:
    """nanoGPT's forward pass, written out with its names."""
    run, model = make_run("arch=nanogpt", "attention.bias=[q]")
    folder = exported(run, "nanogpt")
    args, w = json.loads((folder / "model_args.json").read_text()), load_file(folder / "model.safetensors")
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": VOCAB}
    assert args == {**sizes, "bias": True, "dropout": 0.0}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["transformer.wte.weight"][TOKENS] + w["transformer.wpe.weight"][:T]
    for i in range(2):
        here = f"transformer.h.{i}"
        q, k, v = linear(norm(x, f"{here}.ln_1"), f"{here}.attn.c_attn").split(32, dim=2)
        q, k, v = (part.view(3, T, 4, 8).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, T, 32)
        x = x + linear(y, f"{here}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{here}.ln_2"), f"{here}.mlp.c_fc")), f"{here}.mlp.c_proj")
    found = F.linear(norm(x, "transformer.ln_f"), w["lm_head.weight"])
    assert (found - logits(model)).abs().max() < 1e-4
    assert torch.equal(w["lm_head.weight"], w["transformer.wte.weight"])
    assert len(w) == 4 + 12 * 2 + 1


def test_nanogpt_without_biases_has_none(make_run) -> None:
    run, _ = make_run("arch=nanogpt", "attention.bias=false", "ffn.bias=false", "norm=layernorm_gain")
    folder = exported(run, "nanogpt")
    assert json.loads((folder / "model_args.json").read_text())["bias"] is False
    assert not [name for name in load_file(folder / "model.safetensors") if name.endswith("bias")]


def lens_logits(cfg: dict[str, Any], w: dict[str, Tensor]) -> Tensor:
    """What TransformerLens computes from its tensors and fields (the library is not installed here)."""
    n_heads, d_head, groups = cfg["n_heads"], cfg["d_head"], cfg.get("n_key_value_heads")
    kv = "_" if groups else ""
    repeat = n_heads // (groups or n_heads)
    act = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}[cfg["act_fn"]]

    def norm(x: Tensor, name: str) -> Tensor:
        if cfg["normalization_type"] == "LN":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + cfg["eps"]).sqrt() * w[f"{name}.w"]
        return x + w[f"{name}.b"] if cfg["normalization_type"] == "LN" else x

    def rotated(x: Tensor) -> Tensor:
        if cfg["positional_embedding_type"] != "rotary":
            return x
        angle = torch.arange(T)[:, None] / cfg["rotary_base"] ** (torch.arange(d_head // 2) * 2 / d_head)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # a pair as a complex number
        y = torch.complex(x[..., : d_head // 2], x[..., d_head // 2 :]) * turn
        return torch.cat([y.real, y.imag], dim=-1)

    x = w["embed.W_E"][TOKENS]
    x = x + w["pos_embed.W_pos"][:T] if cfg["positional_embedding_type"] == "standard" else x
    for i in range(cfg["n_layers"]):
        here, y = f"blocks.{i}", norm(x, f"blocks.{i}.ln1")
        q, k, v = (
            torch.einsum("bpd,hde->bphe", y, w[f"{here}.attn.{m}W_{n}"]) + w[f"{here}.attn.{m}b_{n}"]
            for m, n in (("", "Q"), (kv, "K"), (kv, "V"))
        )
        q, k, v = rotated(q), rotated(k).repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / cfg.get("attn_scale", d_head**0.5)
        seen = torch.ones(T, T).tril()
        if cfg.get("use_local_attn") and cfg["attn_types"][i] == "local":
            seen = seen.triu(1 - cfg["window_size"])
        pattern = scores.masked_fill(seen == 0, -torch.inf).softmax(-1)
        z = torch.einsum("bhqk,bkhe->bqhe", pattern, v)
        x = x + torch.einsum("bqhe,hed->bqd", z, w[f"{here}.attn.W_O"]) + w[f"{here}.attn.b_O"]
        y = norm(x, f"{here}.ln2")
        if cfg["gated_mlp"]:
            post = act(y @ w[f"{here}.mlp.W_gate"]) * (y @ w[f"{here}.mlp.W_in"]) + w[f"{here}.mlp.b_in"]
        else:
            post = act(y @ w[f"{here}.mlp.W_in"] + w[f"{here}.mlp.b_in"])
        x = x + post @ w[f"{here}.mlp.W_out"] + w[f"{here}.mlp.b_out"]
    z = norm(x, "ln_final") @ w["unembed.W_U"] + w["unembed.b_U"]
    cap = cfg.get("output_logits_soft_cap")
    return z if cap is None else cap * torch.tanh(z / cap)


@pytest.mark.parametrize(
    "overrides",
    [
        ["arch=nanogpt"],
        ["arch=nanogpt", "attention.bias=false", "ffn.bias=false", "norm=layernorm_plain", "act=relu"],
        ["arch=llama", "attention.n_kv_heads=2", "attention.rope_base=300", "ffn.bias=[down]"],
        ["arch=modern", "attention.qk_norm=false", "act=gelu", "model.softcap=2.0", "attention.scale=0.2",
         "attention.window=5", "attention.long_layers=[1]"],
    ],
)  # fmt: skip
def test_transformer_lens_gives_the_same_logits(overrides: list[str], make_run) -> None:
    run, model = make_run(*overrides)
    folder = exported(run, "transformer-lens")
    cfg, w = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert (lens_logits(cfg, w) - logits(model)).abs().max() < 1e-4
    assert w["blocks.0.attn.W_Q"].shape == (4, 32, 8)
    assert w["blocks.1.attn.W_O"].shape == (4, 8, 32)
    assert w["embed.W_E"].shape == (VOCAB, 32)


def test_what_has_no_counterpart_is_named_and_nothing_is_written(make_run) -> None:
    run, _ = make_run("arch=speedrun", "model.n_layers=4", "threshold=learned")
    before = sorted(run.iterdir())
    with pytest.raises(UserError) as error:
        exported(run, "hf")
    assert [problem.split("=")[0] for problem in error.value.problems] == [
        "model.softcap", "attention.qk_norm", "skip", "threshold", "stream.embed_norm", "stream.x0_lambdas"
    ]  # fmt: skip
    assert sorted(run.iterdir()) == before


def test_the_end_mark_and_a_place_that_is_taken(make_run) -> None:
    run, _ = make_run("arch=nanogpt")
    ByteTokenizer().save(run / "tokenizer.json")
    folder = exported(run, "hf")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 255
    with pytest.raises(UserError, match="is there already: choose another --out"):
        exported(run, "hf")
    exported(run, "hf", "--out", str(run / "other"))
    assert sorted(path.name for path in (run / "other").iterdir()) == ["config.json", "model.safetensors"]


def test_a_run_that_does_not_say_its_vocabulary(make_run) -> None:
    run, _ = make_run("arch=nanogpt")
    (run / "run.json").write_text("{}")
    with pytest.raises(UserError, match="vocab_size"):
        exported(run, "hf")
