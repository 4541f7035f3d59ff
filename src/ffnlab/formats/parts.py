"""What a format can say of a model. Every key of the configuration that is not known to have a counterpart is
refused, so that a part that is written tomorrow is never left out in silence.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffnlab.errors import UserError
from ffnlab.formats.acts import TO_HF

Config = Mapping[str, Any]
Says = Mapping[str, Sequence[Any] | None]

TARGET = "._target_"
GROUPS = ("model", "attention", "norm", "norm_ffn", "residual", "skip", "threshold", "act", "ffn")
LAYERNORM, RMSNORM = "ffnlab.nn.norm.LayerNorm", "ffnlab.nn.norm.RMSNorm"
PLAIN = ("ffnlab.nn.ffn.mlp.MLP", "ffnlab.nn.ffn.paired_init.PairedInit")  # y = down act(up x)
GATED = (  # y = down(act(gate x) * up x)
    "ffnlab.nn.ffn.swiglu.SwiGLU",
    "ffnlab.nn.ffn.geglu.GEGLU",
    "ffnlab.nn.ffn.reglu.ReGLU",
    "ffnlab.nn.ffn.reglu2.ReGLU2",
    "ffnlab.nn.ffn.glu.GLU",
    "ffnlab.nn.ffn.bilinear.Bilinear",
)
# Keys that a format reads off the weights and sizes, or that a trained model's logits do not depend on.
FREE = (
    *(f"model.{key}" for key in ("seq_len", "d_model", "n_layers", "n_heads", "tie_head")),
    *(f"model.{key}" for key in ("pad_vocab_to", "mask_padding", "dropout", "init", "zero_out")),
    *(
        f"ffn.{key}"
        for key in ("expansion", "match", "d_ff", "bias", "share", "dropout", "l1", "l1_warmup", "kernel")
    ),
    *(f"{norm}.{key}" for norm in ("norm", "norm_ffn") for key in ("gain", "bias", "eps")),
    *("attention.bias", "attention.rope_base", "residual.scale_init"),
)
# Keys of which all formats know one value.
PLAINEST: dict[str, Any] = {
    "model.order": "attn_ffn",
    "model.softcap": None,
    "model.value_embeddings": [],
    "model.drop_attn": [],
    "model.drop_ffn": [],
    "attention._target_": "ffnlab.nn.attention.Causal",
    "attention.rope_frac": 1.0,
    "attention.qk_norm": False,
    "attention.scale": None,
    "attention.gate": False,
    "attention.window": None,
    "attention.long_layers": [],
    "residual.attn": "pre",
    "residual.ffn": "pre",
    "residual.scale": 1.0,
    "residual.ffn_scale": 1.0,
    "residual.carry": 1.0,
    "residual.ffn_carry": 1.0,
    "skip._target_": "ffnlab.nn.skip.NoSkip",
    "threshold._target_": "ffnlab.nn.threshold.NoThreshold",
    "ffn.expansion_by_layer": None,
    "ffn.extra": False,
}
# key -> the values that have a counterpart, None for any
COMMON: Says = {
    **dict.fromkeys(FREE),
    **{key: [value] for key, value in PLAINEST.items()},
    "act._target_": list(TO_HF),
}


def refuse(cfg: Config, whose: str, says: Says, more: Sequence[str] = ()) -> None:
    """A UserError with all that has no counterpart in `whose` format; `says` goes before `COMMON`, `more` are
    problems found elsewhere.
    """
    says = {**COMMON, **says}
    unsaid = {path: value for path, value in leaves(cfg) if not can_say(says, path, value)}
    unsaid |= {f"stream.{name}{TARGET}": part["_target_"] for name, part in cfg["stream"].items()}
    problems = []
    for path, value in unsaid.items():
        group = path.partition(".")[0]
        shared = path.endswith(TARGET) or (group == "ffn" and path in says)
        if group + TARGET in unsaid and not shared:
            continue  # an option of a part that is refused as a whole
        known = " or ".join(shown(option) for option in says.get(path) or ())
        line = f"{path.removesuffix(TARGET)}={shown(value)} has no counterpart in {whose}"
        problems.append(f"{line}, which has {known}" if known else line)
    eps = [cfg[norm]["eps"] for norm in ("norm", "norm_ffn") if "eps" in cfg[norm]]
    if len(set(eps)) > 1:
        problems.append(f"norm.eps={eps[0]} and norm_ffn.eps={eps[1]}: {whose} has one for all norms")
    if problems or more:
        raise UserError(*problems, *more)


def can_say(says: Says, path: str, value: Any) -> bool:
    """Whether a value of a key has a counterpart."""
    return path in says and ((options := says[path]) is None or value in options)


def leaves(cfg: Config) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that makes the network; a value that says the same as another in
    other words is that other one.
    """
    same = {
        ("attention", "window"): window(cfg),
        ("attention", "long_layers"): cfg["attention"].get("long_layers") if window(cfg) else [],
        ("ffn", "expansion_by_layer"): different(cfg["ffn"]),
    }
    for group in GROUPS:
        for key, value in cfg[group].items():
            yield f"{group}.{key}", same.get((group, key), value)


def window(cfg: Config) -> int | None:
    """How far attention sees, None where that is the whole sequence."""
    given = cfg["attention"].get("window")
    return None if given is None or given >= cfg["model"]["seq_len"] else given


def different(ffn: Config) -> list[float] | None:
    """The expansions of the layers, None where all layers have the same width."""
    by_layer = ffn.get("expansion_by_layer") or []
    return by_layer if len(set(by_layer)) > 1 and ffn.get("d_ff") is None else None


def kv_heads(cfg: Config) -> int:
    """Heads of keys and values."""
    return cfg["attention"]["n_kv_heads"] or cfg["model"]["n_heads"]


def shown(value: Any) -> str:
    """A value in the words of a command line; a class by its own name."""
    if isinstance(value, str):
        return value.rpartition(".")[2]
    return json.dumps(value)
