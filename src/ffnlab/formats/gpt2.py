"""GPT-2 as transformers saves it (`GPT2LMHeadModel`): q, k and v in one matrix, matrices as (in, out).

Dropout, which plays no role outside training, is left out on the way in, and 0 on the way out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ffnlab.formats import acts, parts
from ffnlab.formats.description import Description, Reading
from ffnlab.formats.names import State, completed, count_layers, modules, renamed

EMBEDDING: str = "transformer.wte.weight"
HEAD: str = "lm_head.weight"
LAYER = "transformer.h.{i}."
NAMES = {
    "embed": "transformer.wte",
    "parts.position.table": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks.{i}.residual.attn.norm": LAYER + "ln_1",
    "blocks.{i}.residual.ffn.norm": LAYER + "ln_2",
    **{f"blocks.{{i}}.attn.{name}": LAYER + f"attn.c_attn.{name}" for name in "qkv"},
    "blocks.{i}.attn.out": LAYER + "attn.c_proj",
    "blocks.{i}.ffn.up": LAYER + "mlp.c_fc",
    "blocks.{i}.ffn.down": LAYER + "mlp.c_proj",
}
PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
UNBIASED = {"embed", "parts.position.table", "head"}
SAYS: parts.Says = {
    "attention.position": ["learned"],
    "norm._target_": [parts.LAYERNORM],
    "norm_ffn._target_": [parts.LAYERNORM],
    "ffn._target_": parts.PLAIN,
}


def read(config: Mapping[str, Any]) -> Reading:
    """config.json as overrides; UserError with all that is unsupported."""
    c = Description(config)
    d_model = c.whole("n_embd", 768)
    d_ff = c.whole("n_inner", 4 * d_model)
    act = acts.HF[c.one_of("activation_function", list(acts.HF), "gelu_new")]
    eps = c.positive("layer_norm_epsilon", c.get("layer_norm_epsilon", 1e-5))
    for key, supported in PLAIN.items():
        c.only(key, c.get(key, supported), supported)
    overrides = [
        "arch=nanogpt",
        f"act={act}",
        f"model.n_layers={c.whole('n_layer', 12)}",
        f"model.d_model={d_model}",
        f"model.n_heads={c.whole('n_head', 12)}",
        f"model.seq_len={c.whole('n_positions', 1024)}",
        f"model.tie_head={str(c.flag('tie_word_embeddings', True)).lower()}",
        "model.pad_vocab_to=1",
        "ffn.match=width",
        f"ffn.expansion={d_ff / d_model}",
        f"norm.eps={eps}",
        f"norm_ffn.eps={eps}",
    ]
    vocab_size = c.whole("vocab_size", 50257)
    c.done()
    return Reading(overrides, vocab_size)


def describe(cfg: parts.Config, state: State, vocab_size: int, end: int | None) -> dict[str, Any]:
    """config.json of a model of ours; UserError with all that has no counterpart."""
    refuse(cfg, "transformers' GPT-2", SAYS)
    model = cfg["model"]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": model["seq_len"],
        "n_embd": model["d_model"],
        "n_layer": model["n_layers"],
        "n_head": model["n_heads"],
        "n_inner": state["blocks.0.ffn.up.weight"].shape[0],
        "activation_function": acts.TO_HF[cfg["act"]["_target_"]],
        "layer_norm_epsilon": cfg["norm"]["eps"],
        "tie_word_embeddings": model["tie_head"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        "dtype": "float32",
    }


def refuse(cfg: parts.Config, whose: str, says: parts.Says, more: Sequence[str] = ()) -> None:
    """`parts.refuse` where there are as many heads of keys and values as of queries."""
    parts.refuse(cfg, whose, {"attention.n_kv_heads": [None, cfg["model"]["n_heads"]], **says}, more)


def theirs(state: State) -> State:
    """Our state dict under their names; gains and biases that we lack are 1 and 0."""
    fused_state = fused(with_all(state))
    return {name: t.T if is_conv(name) else t for name, t in fused_state.items()}


def ours(state: State) -> State:
    """Their state dict under our names."""
    straight = {name: t.T if is_conv(name) else t for name, t in state.items()}
    split = {}
    for name, tensor in straight.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith("attn.c_attn"):
            split |= {f"{module}.{key}.{leaf}": t for key, t in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            split[name] = tensor
    pairs = modules(NAMES, count_layers(state))
    return renamed(split, {there: here for here, there in pairs.items()})


def with_all(state: State) -> State:
    """The state with every gain and bias."""
    names = modules(NAMES, count_layers(state))
    norms = [name for name in names if name.endswith("norm")]
    biased = [name for name in names if name not in UNBIASED]
    return completed(state, norms=norms, biased=biased)


def fused(state: State) -> State:
    """Our state dict under their names, q, k and v as one matrix (3 D, D); matrices still (out, in)."""
    out = renamed(state, modules(NAMES, count_layers(state)))
    for i in range(count_layers(state)):
        module = f"{LAYER.format(i=i)}attn.c_attn"
        for leaf in ("weight", "bias"):
            if f"{module}.q.{leaf}" in out:
                out[f"{module}.{leaf}"] = torch.cat([out.pop(f"{module}.{key}.{leaf}") for key in "qkv"])
    return out


def is_conv(name: str) -> bool:
    """Whether transformers keeps this weight as (in, out)."""
    return re.search(r"\.(c_attn|c_fc|c_proj)\.weight$", name) is not None


def canonical(name: str) -> str | None:
    """The name in a full model of a tensor in a file; None for the causal masks that older files hold."""
    if re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)", name):
        return None
    return f"transformer.{name}" if re.match(r"(wte|wpe|h|ln_f)\.", name) else name
