"""From a plain configuration to parts: the only file that sees every part. Pure: no folders, no loop."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ffnlab.config import GROUPS, compose, config_dir, factory, locate, plain, settings
from ffnlab.data import Dataset, open_dataset
from ffnlab.device import has_bf16
from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FFN
from ffnlab.nn.ffn.width import solve_width
from ffnlab.nn.gpt import GPT, Block, ModelSettings
from ffnlab.nn.head import Head
from ffnlab.nn.init import initialise
from ffnlab.nn.position import ADDED_POSITIONS
from ffnlab.nn.residual import PLACEMENTS, Residual
from ffnlab.nn.stream import EmbedDropout, StreamPart, ValueEmbeddings
from ffnlab.probe import Probe, ProbeSettings
from ffnlab.record.sinks import Sink

__all__ = [
    "GROUPS",
    "compose",
    "config_dir",
    "dataset",
    "factory",
    "locate",
    "logger",
    "model",
    "optimizer",
    "plain",
    "probes",
]

Config = Mapping[str, Any]
ATTENTION_MATRICES = frozenset({"q", "k", "v", "out"})
FFN_MATRICES = frozenset({"up", "gate", "down"})
SHARED_FFN = (
    "expansion",
    "match",
    "d_ff",
    "bias",
    "dropout",
)  # keys of train.yaml's `ffn`, which build reads itself
SHARED_DATA = ("seed", "val_frac", "test_frac")


def model(cfg: Config, vocab_size: int) -> GPT:
    """The network, initialised: the same seed gives shared parameters to the bit, whatever the variant."""
    sizes = settings(ModelSettings, cfg["model"], "model")
    padded = math.ceil(vocab_size / sizes.pad_vocab_to) * sizes.pad_vocab_to
    make_norm = partial(factory(cfg["norm"], "norm", packages=packages(cfg)), sizes.d_model)
    embed = nn.Embedding(padded, sizes.d_model)
    head = Head(
        sizes.d_model, padded, vocab_size=vocab_size, softcap=sizes.softcap, mask_padding=sizes.mask_padding
    )
    if sizes.tie_head:
        head.weight = embed.weight
    gpt = GPT(
        sizes,
        vocab_size=vocab_size,
        blocks=blocks(cfg, sizes),
        parts=stream_parts(cfg, sizes, padded),
        norm=nn.Identity() if ends_in_norm(cfg, sizes) else make_norm(),
        embed=embed,
        head=head,
    )
    initialise(gpt, seed=cfg["seed"], scheme=sizes.init, zero_out=sizes.zero_out, n_layers=sizes.n_layers)
    return gpt


def roles(sizes: ModelSettings, layer: int) -> list[str]:
    """The sublayers of a block, in their order."""
    dropped = {"attn": sizes.drop_attn, "ffn": sizes.drop_ffn}
    return [role for role in sizes.order.split("_") if layer not in dropped[role]]


def ends_in_norm(cfg: Config, sizes: ModelSettings) -> bool:
    """Whether the last sublayer is post-norm, which leaves no place for a final norm."""
    last = [role for layer in range(sizes.n_layers) for role in roles(sizes, layer)][-1:]
    return any(cfg["residual"][role] == "post" for role in last)


def blocks(cfg: Config, sizes: ModelSettings) -> list[Block]:
    """One Block per layer."""
    norms = {"attn": "norm", "ffn": "norm_ffn"}
    prefix = {"attn": "", "ffn": "ffn_"}
    make_ffn = ffn_maker(cfg, sizes)
    make_attn = attention_maker(cfg, sizes)
    make = {"attn": make_attn, "ffn": lambda layer: make_ffn()}

    def residual(role: str) -> Residual:
        norm = partial(factory(cfg[norms[role]], norms[role], packages=packages(cfg)), sizes.d_model)
        node = cfg["residual"]
        own = {key: node[prefix[role] + key] for key in ("scale", "carry")}
        shared = {"scale_init": node["scale_init"], "d_model": sizes.d_model, "dropout": sizes.dropout}
        return PLACEMENTS[node[role]](norm, **own, **shared)

    return [
        Block(
            {role: make[role](i) for role in roles(sizes, i)},
            {role: residual(role) for role in roles(sizes, i)},
        )
        for i in range(sizes.n_layers)
    ]


def attention_part(cfg: Config) -> Callable[..., nn.Module]:
    """The attention class with its own options."""
    node = dict(cfg["attention"] or {})
    if "bias" in node:
        node["bias"] = matrices(node["bias"], ATTENTION_MATRICES, "attention.bias")
    given = ("layer", "d_model", "n_heads", "seq_len", "dropout", "value_embedding")
    return factory(node, "attention", given, packages(cfg))


def attention_maker(cfg: Config, sizes: ModelSettings) -> Callable[[int], nn.Module]:
    """layer -> attention of that layer."""
    make = attention_part(cfg)
    with_values = {layer for table in sizes.value_embeddings for layer in table}
    return lambda layer: make(
        layer=layer,
        d_model=sizes.d_model,
        n_heads=sizes.n_heads,
        seq_len=sizes.seq_len,
        dropout=sizes.dropout,
        value_embedding=layer in with_values,
    )


def ffn_part(cfg: Config) -> Callable[..., FFN]:
    """The FFN class with its own options."""
    own = {key: value for key, value in dict(cfg["ffn"] or {}).items() if key not in SHARED_FFN}
    return factory(own, "ffn", ("d_model", "d_ff", "make_act", "bias", "dropout"), packages(cfg))


def act_part(cfg: Config) -> partial[nn.Module]:
    """The activation class with its own options."""
    return factory(cfg["act"], "act", ("d_ff",), packages(cfg))


def ffn_maker(cfg: Config, sizes: ModelSettings) -> Callable[[], FFN]:
    """() -> a new FFN of the solved width, with its own activation and threshold."""
    node = cfg["ffn"]
    bias = matrices(node["bias"], FFN_MATRICES, "ffn.bias")
    make = partial(ffn_part(cfg), d_model=sizes.d_model, bias=bias, dropout=float(node["dropout"]))
    act = act_part(cfg)
    threshold = factory(cfg["threshold"], "threshold", packages=packages(cfg))()
    if getattr(act.func, "shift_invariant", False) and getattr(threshold, "scope", "neuron") != "neuron":
        warnings.warn(
            "act ignores a threshold that all neurons share: give threshold.scope=neuron", stacklevel=2
        )
    d_ff = node["d_ff"]
    if d_ff is None:
        bare = partial(make, make_act=lambda width: act(d_ff=width))
        d_ff = solve_width(
            lambda width: bare(d_ff=width), sizes.d_model, float(node["expansion"]), node["match"], bias
        )
    else:
        warnings.warn(f"ffn.d_ff={d_ff} is given: ffn.expansion and ffn.match are ignored", stacklevel=2)
    return partial(make, d_ff=d_ff, make_act=lambda width: threshold(act(d_ff=width), width))


def matrices(choice: Any, names: frozenset[str], path: str) -> frozenset[str]:
    """`bias`: true is every matrix, false none, a list those named."""
    chosen = names if choice is True else frozenset(choice or ())
    if not chosen <= names:
        raise UserError(f"{path}={choice!r}: expected true, false or a list of {', '.join(sorted(names))}")
    return chosen


def stream_parts(cfg: Config, sizes: ModelSettings, padded_vocab: int) -> dict[str, nn.Module]:
    """What touches the stream between blocks, in the order in which it acts: positions, value embeddings,
    skip, stream.
    """
    parts: dict[str, nn.Module] = {}
    added = ADDED_POSITIONS.get(cfg["attention"].get("position", ""))
    if added is not None:
        parts["position"] = added(d_model=sizes.d_model, seq_len=sizes.seq_len, tied=sizes.tie_head)
    if sizes.dropout:
        parts["embed_dropout"] = EmbedDropout(sizes.dropout)
    if sizes.value_embeddings:
        d_value = sizes.d_model // sizes.n_heads * (cfg["attention"].get("n_kv_heads") or sizes.n_heads)
        parts["value_embeddings"] = ValueEmbeddings(
            tables=sizes.value_embeddings, vocab_size=padded_vocab, d_value=d_value
        )
    for name, node in {"skip": cfg["skip"], **cfg["stream"]}.items():
        path = name if name == "skip" else f"stream.{name}"
        part = factory(node, path, ("d_model", "n_layers"), packages(cfg))(
            d_model=sizes.d_model, n_layers=sizes.n_layers
        )
        if type(part).before is not StreamPart.before or type(part).after is not StreamPart.after:
            parts[name] = part
    return parts


def packages(cfg: Config) -> Sequence[str]:
    """Where classes of parts may come from: ffnlab and what the command line names."""
    return ("ffnlab", *cfg["plugins"])


def dataset(cfg: Config, cache: Path, progress: Callable[[str, float], None] | None = None) -> Dataset:
    """Tokenised (once) and memory-mapped."""
    shared = {key: cfg["data"][key] for key in SHARED_DATA}
    seq_len = cfg["model"]["seq_len"]
    return open_dataset(
        source(cfg), tokenizer(cfg), seq_len=seq_len, cache=cache, progress=progress, **shared
    )


def source(cfg: Config) -> Any:
    """Where the text or the tokens come from."""
    own = {key: value for key, value in cfg["data"].items() if key not in SHARED_DATA}
    return factory(own, "data", packages=packages(cfg))()


def tokenizer(cfg: Config) -> Any:
    """How text becomes tokens."""
    return factory(cfg["tokenizer"], "tokenizer", packages=packages(cfg))()


def optimizer(cfg: Config, gpt: GPT) -> Any:
    """The optimizer over all of the model's parameters."""
    node = dict(cfg["optim"])
    if node.get("ns_precision") == "auto":
        node["ns_precision"] = "bf16" if has_bf16(gpt.embed.weight.device) else "fp32"
    return factory(node, "optim", packages=packages(cfg))(gpt)


def schedule(cfg: Config) -> Callable[[int], float]:
    """step -> factor on the learning rate."""
    return factory(cfg["schedule"], "schedule", ("steps",), packages(cfg))(steps=cfg["train"]["steps"])


def probe_settings(cfg: Config) -> ProbeSettings:
    """The keys of `probe` that are settings."""
    return settings(
        ProbeSettings, {k: v for k, v in cfg["probe"].items() if not isinstance(v, Mapping)}, "probe"
    )


def probes(cfg: Config) -> dict[str, Probe]:
    """The keys of `probe` that are probes."""
    nodes = {name: node for name, node in cfg["probe"].items() if isinstance(node, Mapping)}
    return {name: factory(node, f"probe.{name}", packages=packages(cfg))() for name, node in nodes.items()}


def logger(cfg: Config) -> Sink:
    """Where a copy of the record goes."""
    return factory(cfg["logger"], "logger", packages=packages(cfg))()
