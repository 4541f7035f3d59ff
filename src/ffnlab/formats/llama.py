"""Llama and its kin as transformers saves them: `llama`, `mistral` (a window), `arcee` (an FFN without gate).

Dropout is left out both ways, as in gpt2.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from ffnlab.formats import acts, parts
from ffnlab.formats.description import Description, Reading
from ffnlab.formats.names import State, completed, count_layers, modules, renamed

EMBEDDING: str = "model.embed_tokens.weight"
HEAD: str = "lm_head.weight"
LAYER = "model.layers.{i}."
ATTENTION = {
    f"blocks.{{i}}.attn.{here}": LAYER + f"self_attn.{here[0]}_proj" for here in ("q", "k", "v", "out")
}
FFN = {f"blocks.{{i}}.ffn.{name}": LAYER + f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks.{i}.residual.attn.norm": LAYER + "input_layernorm",
    "blocks.{i}.residual.ffn.norm": LAYER + "post_attention_layernorm",
    **ATTENTION,
    **FFN,
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "arcee": "ArceeForCausalLM"}
# What transformers takes a key to be that config.json leaves out, where the kinds differ.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "rms_norm_eps": 1e-6},
    "mistral": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "arcee": {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
}
SAYS: parts.Says = {
    "attention.position": ["rope"],
    "attention.n_kv_heads": None,
    "norm._target_": [parts.RMSNORM],
    "norm_ffn._target_": [parts.RMSNORM],
    "ffn._target_": [*parts.GATED, *parts.PLAIN],
}


def read(config: Mapping[str, Any]) -> Reading:
    """config.json as overrides; UserError with all that is unsupported."""
    kind = config["model_type"]
    c = Description({**LEFT_OUT[kind], **config})
    d_model, n_heads, seq_len = (
        c.whole(key) for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    act = acts.HF[c.one_of("hidden_act", list(acts.HF), "silu")]
    eps = c.positive("rms_norm_eps", c.get("rms_norm_eps", None))
    window = c.whole("sliding_window") if kind == "mistral" and c.get("sliding_window", None) else None
    c.only("head_dim", c.get("head_dim", d_model // n_heads), d_model // n_heads)
    overrides = [
        "arch=llama",
        *(["ffn=mlp"] if kind == "arcee" else []),
        f"act={act}",
        f"model.n_layers={c.whole('num_hidden_layers')}",
        f"model.d_model={d_model}",
        f"model.n_heads={n_heads}",
        f"model.seq_len={seq_len}",
        f"model.tie_head={str(c.flag('tie_word_embeddings', False)).lower()}",
        "model.pad_vocab_to=1",
        f"attention.n_kv_heads={c.whole('num_key_value_heads', n_heads)}",
        f"attention.window={'null' if window is None else window}",
        f"attention.rope_base={rope_base(c)}",
        f"attention.bias={str(c.flag('attention_bias', False)).lower()}",
        f"ffn.bias={str(c.flag('mlp_bias', False)).lower()}",
        "ffn.match=width",
        f"ffn.expansion={c.whole('intermediate_size') / d_model}",
        f"norm.eps={eps}",
        f"norm_ffn.eps={eps}",
    ]
    vocab_size = c.whole("vocab_size")
    c.done()
    return Reading(overrides, vocab_size)


def rope_base(c: Description) -> float:
    """The base of the rotation, which newer files keep in `rope_parameters`; no other kind than the plain."""
    base, share = c.get("rope_theta", 1e4), c.get("partial_rotary_factor", 1.0)
    for key in ("rope_scaling", "rope_parameters"):
        node = c.get(key, {})
        if not isinstance(node, Mapping):
            c.problems.append(f"{key} is no object")
            continue
        c.only(f"{key}.rope_type", node.get("rope_type", node.get("type", "default")), "default")
        base, share = node.get("rope_theta", base), node.get("partial_rotary_factor", share)
    c.only("partial_rotary_factor", share, 1.0)
    return c.positive("rope_theta", base)


def describe(cfg: parts.Config, state: State, vocab_size: int, end: int | None) -> dict[str, Any]:
    """config.json of a model of ours; UserError with all that has no counterpart."""
    biased = {
        part: any(re.match(rf"blocks\.\d+\.{part}\..*bias$", n) for n in state) for part in ("attn", "ffn")
    }
    window = parts.window(cfg)
    gated = cfg["ffn"]["_target_"] not in parts.PLAIN
    kind = "arcee" if not gated else "llama" if window is None else "mistral"
    more = []
    if kind == "mistral" and any(biased.values()):
        more = [f"attention.window={window} has no counterpart in transformers' Llama with biases"]
    windows: parts.Says = {"attention.window": [window if gated else None]}
    parts.refuse(cfg, "transformers' Llama", {**SAYS, **windows}, more)
    model = cfg["model"]
    base = cfg["attention"]["rope_base"]
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": vocab_size,
        "max_position_embeddings": model["seq_len"],
        "hidden_size": model["d_model"],
        "num_hidden_layers": model["n_layers"],
        "num_attention_heads": model["n_heads"],
        "num_key_value_heads": parts.kv_heads(cfg),
        "head_dim": model["d_model"] // model["n_heads"],
        "intermediate_size": state["blocks.0.ffn.up.weight"].shape[0],
        "hidden_act": acts.TO_HF[cfg["act"]["_target_"]],
        "rms_norm_eps": cfg["norm"]["eps"],
        "rope_theta": base,  # read by transformers 4, the next line by 5
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        **({"sliding_window": window} if kind == "mistral" else {}),
        **({} if kind == "mistral" else {"attention_bias": biased["attn"], "mlp_bias": biased["ffn"]}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": model["tie_head"],
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        "dtype": "float32",
    }


def theirs(state: State) -> State:
    """Our state dict under their names; gains that we lack are 1, and biases 0 where others have one."""
    n_layers = count_layers(state)
    names = modules(NAMES, n_layers)
    biased: list[str] = []
    for group in (ATTENTION, FFN):
        inside = [name for name in modules(group, n_layers) if f"{name}.weight" in state]
        biased += inside if any(f"{name}.bias" in state for name in inside) else []
    norms = [name for name in names if name.endswith("norm")]
    return renamed(completed(state, norms=norms, biased=biased), names)


def ours(state: State) -> State:
    """Their state dict under our names."""
    pairs = modules(NAMES, count_layers(state))
    return renamed(state, {there: here for here, there in pairs.items()})


def canonical(name: str) -> str | None:
    """The name in a full model of a tensor in a file; None for the rotation's frequencies in older files."""
    if name.endswith(".rotary_emb.inv_freq"):
        return None
    return f"model.{name}" if re.match(r"(embed_tokens|layers|norm)\.", name) else name
