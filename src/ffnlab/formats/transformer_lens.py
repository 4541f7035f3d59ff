"""TransformerLens: the names and shapes of its `HookedTransformer`, the fields of its configuration.

Attention as (H, D, K) per head, keys and values of grouped queries under `_W_K`, `_W_V`; matrices (in, out);
biases everywhere, norms with a gain. It makes its masks and rotation tables itself:
`HookedTransformer(HookedTransformerConfig(**json)).load_state_dict(tensors, strict=False)`.

Axes: D d_model, H heads, K d_head.
"""

import re
from typing import Any

import torch
from torch import Tensor

from ffnlab.formats import acts, parts
from ffnlab.formats.names import State, completed

NORMS = {parts.LAYERNORM: "LN", parts.RMSNORM: "RMS"}
ACTS = {acts.ACTS[choice]: acts.TO_HF[acts.ACTS[choice]] for choice in ("gelu", "gelu_tanh", "relu", "silu")}
SAYS: parts.Says = {
    "model.softcap": None,
    "attention.position": ["rope", "learned"],
    "attention.n_kv_heads": None,
    "attention.scale": None,
    "attention.window": None,
    "attention.long_layers": None,
    "norm._target_": list(NORMS),
    "act._target_": list(ACTS),
    "ffn._target_": [*parts.GATED, *parts.PLAIN],
}


def describe(cfg: parts.Config, state: State, vocab_size: int) -> dict[str, Any]:
    """Fields of `HookedTransformerConfig`; UserError with all that has no counterpart."""
    gated = cfg["ffn"]["_target_"] in parts.GATED
    before = [f"blocks.0.ffn.{name}.bias" for name in ("gate", "up")]
    more = []
    if gated and any(name in state for name in before):
        more = ["ffn.bias: biases of gate and up have no counterpart in TransformerLens' gated MLP"]
    parts.refuse(cfg, "TransformerLens", {**SAYS, "norm_ffn._target_": [cfg["norm"]["_target_"]]}, more)
    model, attention, window = cfg["model"], cfg["attention"], parts.window(cfg)
    fields: dict[str, Any] = {
        "model_name": "custom",
        "n_layers": model["n_layers"],
        "d_model": model["d_model"],
        "n_ctx": model["seq_len"],
        "n_heads": model["n_heads"],
        "d_head": model["d_model"] // model["n_heads"],
        "d_mlp": state["blocks.0.ffn.up.weight"].shape[0],
        "d_vocab": vocab_size,
        "act_fn": ACTS[cfg["act"]["_target_"]],
        "gated_mlp": gated,
        "normalization_type": NORMS[cfg["norm"]["_target_"]],
        "final_rms": cfg["norm"]["_target_"] == parts.RMSNORM,
        "eps": cfg["norm"]["eps"],
        "positional_embedding_type": "rotary" if attention["position"] == "rope" else "standard",
    }
    if attention["position"] == "rope":
        fields |= {"rotary_base": attention["rope_base"], "rotary_adjacent_pairs": False}
    if parts.kv_heads(cfg) != model["n_heads"]:
        fields["n_key_value_heads"] = parts.kv_heads(cfg)
    if attention["scale"] is not None:
        fields["attn_scale"] = 1 / attention["scale"]
    if model["softcap"] is not None:
        fields["output_logits_soft_cap"] = model["softcap"]
    if window is not None:
        far = set(attention["long_layers"])
        kinds = ["global" if i in far else "local" for i in range(model["n_layers"])]
        fields |= {"use_local_attn": True, "window_size": window, "attn_types": kinds}
    return fields


def theirs(state: State, fields: dict[str, Any]) -> State:
    """Our state dict under their names and in their shapes; `fields` are those of `describe`."""
    n_layers, n_heads = fields["n_layers"], fields["n_heads"]
    norms = [
        "norm",
        *(f"blocks.{i}.residual.{role}.norm" for i in range(n_layers) for role in ("attn", "ffn")),
    ]
    matrices = (re.fullmatch(r"(blocks\.\d+\.(?:attn|ffn)\.(?!gate)\w+)\.weight", name) for name in state)
    biased = [match[1] for match in matrices if match]
    biased += norms if fields["normalization_type"] == "LN" else []
    state = completed(state, norms=norms, biased=biased)
    unembed = state.get("head.weight", state["embed.weight"])
    out = {
        "embed.W_E": state["embed.weight"],
        "unembed.W_U": unembed.T,
        "unembed.b_U": torch.zeros(len(unembed)),
        **norm(state, "norm", "ln_final"),
    }
    if "parts.position.table.weight" in state:
        out["pos_embed.W_pos"] = state["parts.position.table.weight"]
    for i in range(n_layers):
        here = there = f"blocks.{i}"
        out |= norm(state, f"{here}.residual.attn.norm", f"{there}.ln1")
        out |= norm(state, f"{here}.residual.ffn.norm", f"{there}.ln2")
        out |= attention(state, f"{here}.attn", f"{there}.attn", n_heads)
        out |= ffn(state, f"{here}.ffn", f"{there}.mlp")
    return out


def norm(state: State, here: str, there: str) -> State:
    """Gain and bias; an RMSNorm has no bias there."""
    bias = state.get(f"{here}.bias")
    return {f"{there}.w": state[f"{here}.weight"], **({} if bias is None else {f"{there}.b": bias})}


def attention(state: State, here: str, there: str, n_heads: int) -> State:
    """Matrices per head: (H K, D) to (H, D, K), the one back to (H, K, D)."""
    d_head = len(state[f"{here}.q.weight"]) // n_heads

    def heads(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, d_head))

    grouped = "_" if len(state[f"{here}.k.weight"]) < len(state[f"{here}.q.weight"]) else ""
    out = {f"{there}.W_O": heads(state[f"{here}.out.weight"].T), f"{there}.b_O": state[f"{here}.out.bias"]}
    for name, mark in (("q", ""), ("k", grouped), ("v", grouped)):
        out[f"{there}.{mark}W_{name.upper()}"] = heads(state[f"{here}.{name}.weight"]).mT
        out[f"{there}.{mark}b_{name.upper()}"] = heads(state[f"{here}.{name}.bias"])
    return out


def ffn(state: State, here: str, there: str) -> State:
    """Matrices as (in, out); what is `up` here is `in` there, gated or not."""
    out = {f"{there}.b_in": state[f"{here}.up.bias"], f"{there}.b_out": state[f"{here}.down.bias"]}
    for old, new in (("up", "in"), ("gate", "gate"), ("down", "out")):
        if f"{here}.{old}.weight" in state:
            out[f"{there}.W_{new}"] = state[f"{here}.{old}.weight"].T
    return out
