"""What is said of parts and activations elsewhere, against those parts and against transformers itself."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ffnlab import build
from ffnlab.config import locate
from ffnlab.errors import UserError
from ffnlab.formats import acts, gpt2, llama, nanogpt, parts, transformer_lens
from ffnlab.formats.families import family_out
from ffnlab.nn.ffn.base import GatedFFN
from ffnlab.nn.ffn.mlp import MLP

transformers = pytest.importorskip("transformers")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_an_activation_is_that_of_its_yaml_and_nothing_else() -> None:
    for choice, target in acts.ACTS.items():
        assert yaml.safe_load((CONFIGS / f"act/{choice}.yaml").read_text()) == {"_target_": target}


@pytest.mark.parametrize("name", acts.HF)
def test_an_activation_is_the_function_of_that_name_in_transformers(name: str) -> None:
    x = torch.linspace(-9, 9, 2001)
    ours = locate(acts.ACTS[acts.HF[name]])(d_ff=len(x))
    assert torch.allclose(ours(x), transformers.activations.ACT2FN[name](x), atol=1e-5)


def test_ffns_that_count_as_plain_or_gated_have_that_formula() -> None:
    gated = [locate(target) for target in parts.GATED]
    assert all(issubclass(cls, GatedFFN) and cls.hidden is GatedFFN.hidden for cls in gated)
    x = torch.randn(5, 8)
    for target in parts.PLAIN:
        ffn = locate(target)(
            d_model=8, d_ff=6, make_act=lambda n: torch.nn.Tanh(), bias=frozenset(), dropout=0.0
        )
        assert torch.equal(ffn.hidden(x), torch.tanh(x @ ffn.up.weight.T))
        assert type(ffn).forward is MLP.forward


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        (gpt2, ["arch=nanogpt", "model.tie_head=false"]),
        (llama, ["arch=llama", "attention.n_kv_heads=1", "attention.bias=true", "ffn.bias=true"]),
        (llama, ["arch=llama", "ffn=mlp"]),
    ],
)
def test_there_and_back_is_the_same(family, overrides: list[str]) -> None:
    cfg, _ = build.compose([*overrides, "model.n_layers=3", "model.d_model=16", "model.n_heads=2"])
    state = build.model(cfg, 50).state_dict()
    back = family.ours(family.theirs(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", ["llama", "mistral", "arcee"])
def test_keys_that_are_left_out_are_what_transformers_takes_them_to_be(kind: str) -> None:
    given = {"hidden_size": 64, "num_attention_heads": 16, "num_hidden_layers": 1, "intermediate_size": 80}
    given |= {"max_position_embeddings": 8192, "vocab_size": 50, "model_type": kind}
    theirs = transformers.AutoConfig.for_model(**given, bos_token_id=0, eos_token_id=0)
    says = dict(line.split("=", 1) for line in llama.read(given).overrides)
    assert acts.HF[theirs.hidden_act] == says["act"]
    assert theirs.rms_norm_eps == float(says["norm.eps"]) == float(says["norm_ffn.eps"])
    assert str(theirs.num_key_value_heads) == says["attention.n_kv_heads"]
    assert str(getattr(theirs, "sliding_window", None) or "null") == says["attention.window"]
    assert theirs.rope_parameters["rope_theta"] == float(says["attention.rope_base"])
    assert str(theirs.tie_word_embeddings).lower() == says["model.tie_head"]


@pytest.fixture(scope="module")
def archs() -> dict[str, dict[str, Any]]:
    """The plain configurations of the two families, small."""
    small = ["model.n_layers=4", "model.d_model=16", "model.n_heads=2"]
    return {arch: build.compose([f"arch={arch}", *small])[0] for arch in ("nanogpt", "llama", "modern")}


def refusals(
    cfg: dict[str, Any], describe: Callable[..., dict], state: dict | None = None, **changes
) -> list[str]:
    """What `describe` names, up to its value, when keys (`group__key`) of the configuration are changed."""
    cfg = copy.deepcopy(cfg)
    for path, value in changes.items():
        group, _, key = path.partition("__")
        (cfg[group] if key else cfg)[key or group] = value
    with pytest.raises(UserError) as error:
        describe(
            cfg, state or {}, 50, **({"end": None} if describe in (gpt2.describe, llama.describe) else {})
        )
    return sorted(problem.split("=")[0] for problem in error.value.problems)


def test_all_that_has_no_counterpart_is_named_at_once(archs: dict[str, dict[str, Any]]) -> None:
    changes = {
        "threshold": {"_target_": "ffnlab.nn.threshold.LearnedThreshold", "init": 0.0},
        "skip": {"_target_": "ffnlab.nn.skip.UNet", "gate": "sigmoid"},
        "stream": {"x0_lambdas": {"_target_": "ffnlab.nn.stream.X0Lambdas"}},
        "ffn___target_": "ffnlab.nn.ffn.moe.MoE",
        "ffn__n_experts": 8,
        "ffn__extra": True,
        "ffn__expansion_by_layer": [1.0, 2.0, 2.0, 2.0],
        "act": {"_target_": "ffnlab.nn.act.elu.XIELU", "beta": 0.5},
        "model__drop_attn": [1],
        "model__order": "parallel",
        "residual__scale": 0.8,
        "norm_ffn__eps": 1e-3,
        "attention__sinks": 4,  # a key that nobody knows
    }
    named = ["act", "attention.sinks", "ffn", "ffn.expansion_by_layer", "ffn.extra", "model.drop_attn"]
    named += ["model.order", "norm.eps", "residual.scale", "skip", "stream.x0_lambdas", "threshold"]
    assert refusals(archs["llama"], llama.describe, **changes) == named
    assert refusals(archs["nanogpt"], gpt2.describe, **changes) == named
    assert refusals(archs["modern"], llama.describe) == ["attention.qk_norm", "model.softcap"]


def test_what_single_formats_lack(archs: dict[str, dict[str, Any]]) -> None:
    biases = {"blocks.0.ffn.up.bias": torch.zeros(1)}
    plain = {"ffn___target_": parts.PLAIN[0], "attention__window": 4}
    assert refusals(archs["llama"], llama.describe, **plain) == ["attention.window"]
    assert refusals(archs["llama"], llama.describe, biases, attention__window=4) == ["attention.window"]
    assert refusals(archs["nanogpt"], gpt2.describe, attention__n_kv_heads=1) == ["attention.n_kv_heads"]
    named = refusals(archs["llama"], transformer_lens.describe, biases, norm_ffn=archs["nanogpt"]["norm"])
    assert [name.partition(":")[0] for name in named] == ["ffn.bias", "norm.eps", "norm_ffn"]
    wide = {"blocks.0.ffn.up.weight": torch.zeros(48, 16)}
    relu = {"_target_": acts.ACTS["relu"]}
    assert refusals(archs["nanogpt"], nanogpt.describe, wide, act=relu, model__tie_head=False) == [
        "act",
        "d_ff",
        "model.tie_head",
    ]


@pytest.mark.parametrize("past", [None, 0, 5, -1])
def test_a_window_as_long_as_the_sequence_is_none(archs: dict[str, dict[str, Any]], past: int | None) -> None:
    """`past`: how much longer than the sequence the window is."""
    cfg = copy.deepcopy(archs["llama"])
    cfg["attention"]["window"] = None if past is None else cfg["model"]["seq_len"] + past
    said = llama.describe(cfg, {"blocks.0.ffn.up.weight": torch.zeros(48, 16)}, 50, None)
    narrow = past == -1
    assert said["model_type"] == ("mistral" if narrow else "llama")
    assert said.get("sliding_window") == (cfg["attention"]["window"] if narrow else None)


GROUPS = ("attention", "norm", "residual", "skip", "stream", "threshold", "act", "ffn")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_is_refused_or_gives_the_same_logits(group: str, choice: str) -> None:
    """Nothing goes out with a part left out in silence, also no part that is written tomorrow."""
    chosen = f"stream=[{choice}]" if group == "stream" else f"{group}={choice}"
    sizes = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=12"]
    cfg, _ = build.compose(["arch=llama", *sizes, "model.pad_vocab_to=1", chosen])
    model = build.model(cfg, 50).eval()
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=rng))
    family, state = family_out(cfg), model.state_dict()
    try:
        config = family.describe(cfg, state, 50, None)
    except UserError:
        return
    config = transformers.AutoConfig.for_model(**config)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.load_state_dict(family.theirs(state))
    with torch.no_grad():
        assert (theirs(TOKENS).logits - model(TOKENS)).abs().max() < 1e-4
