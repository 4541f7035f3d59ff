"""From a plain configuration to parts: the only file that sees every part. Pure: no folders, no loop."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ffnlab.config import GROUPS, compose, config_dir, factory, locate, packages, plain, settings
from ffnlab.data import Dataset, open_dataset
from ffnlab.device import has_bf16
from ffnlab.layers import act_part, ffn_maker, ffn_part, is_absent, matrices
from ffnlab.nn.absent import Absent
from ffnlab.nn.crossover import Kernels
from ffnlab.nn.gpt import GPT, ORDERS, Block, ModelSettings, ParallelBlock
from ffnlab.nn.head import Head
from ffnlab.nn.init import initialise
from ffnlab.nn.l1 import L1
from ffnlab.nn.position import ADDED_POSITIONS
from ffnlab.nn.residual import PLACEMENTS, Residual
from ffnlab.nn.share import share_ffns
from ffnlab.nn.stream import EmbedDropout, StreamPart, ValueEmbeddings
from ffnlab.probe import Probe, ProbeSettings
from ffnlab.record.sinks import Sink

__all__ = [
    "GROUPS",
    "act_part",
    "compose",
    "config_dir",
    "dataset",
    "factory",
    "ffn_maker",
    "ffn_part",
    "kernels",
    "locate",
    "logger",
    "matrices",
    "model",
    "optimizer",
    "packages",
    "plain",
    "probes",
]

Config = Mapping[str, Any]
PLACED_AS = {"attn": "attn", "ffn": "ffn", "ffn_extra": "ffn"}  # role -> key of norms and residuals
ATTENTION_MATRICES = frozenset({"q", "k", "v", "out"})
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


def roles(cfg: Config, sizes: ModelSettings, layer: int) -> list[str]:
    """The sublayers of a block, in their order."""
    missing = set() if cfg["ffn"]["extra"] else {"ffn_extra"}
    if layer in sizes.drop_attn or is_absent(cfg["attention"]):
        missing |= {"attn"}
    if layer in sizes.drop_ffn or is_absent(cfg["ffn"]):
        missing |= {"ffn", "ffn_extra"}
    return [role for role in ORDERS[sizes.order] if role not in missing]


def ends_in_norm(cfg: Config, sizes: ModelSettings) -> bool:
    """Whether the last sublayer is post-norm, which leaves no place for a final norm."""
    last = [role for layer in range(sizes.n_layers) for role in roles(cfg, sizes, layer)][-1:]
    return any(cfg["residual"][PLACED_AS[role]] == "post" for role in last)


def blocks(cfg: Config, sizes: ModelSettings) -> list[Block]:
    """One Block per layer."""
    norms = {"attn": "norm", "ffn": "norm_ffn"}
    prefix = {"attn": "", "ffn": "ffn_"}
    make_ffn = ffn_maker(cfg, sizes)
    make = {"attn": attention_maker(cfg, sizes), "ffn": make_ffn, "ffn_extra": make_ffn}
    kind = ParallelBlock if sizes.order == "parallel" else Block

    def residual(role: str) -> Residual:
        kind_of = PLACED_AS[role]
        norm = norms[kind_of]
        make_norm = partial(factory(cfg[norm], norm, packages=packages(cfg)), sizes.d_model)
        node = cfg["residual"]
        own = {key: node[prefix[kind_of] + key] for key in ("scale", "carry")}
        shared = {"scale_init": node["scale_init"], "d_model": sizes.d_model, "dropout": sizes.dropout}
        return PLACEMENTS[node[kind_of]](make_norm, **own, **shared)

    built = [
        kind(
            {role: make[role](i) for role in roles(cfg, sizes, i)},
            {role: residual(role) for role in roles(cfg, sizes, i)},
        )
        for i in range(sizes.n_layers)
    ]
    share_ffns(built, cfg["ffn"]["share"])
    return built


def attention_part(cfg: Config) -> Callable[..., nn.Module]:
    """The attention class with its own options."""
    node = dict(cfg["attention"] or {})
    if is_absent(node):
        return factory(node, "attention")
    if "bias" in node:
        node["bias"] = matrices(node["bias"], ATTENTION_MATRICES, "attention.bias")
    given = ("layer", "d_model", "n_heads", "seq_len", "dropout", "value_embedding")
    return factory(node, "attention", given, packages(cfg))


def attention_maker(cfg: Config, sizes: ModelSettings) -> Callable[[int], nn.Module]:
    """layer -> attention of that layer."""
    if is_absent(cfg["attention"]):
        return lambda layer: Absent()
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


def kernels(cfg: Config, gpt: GPT, dtype: torch.dtype) -> Kernels:
    """Which way the FFNs of the model go when they compute in `dtype`."""
    return Kernels(gpt, cfg["ffn"]["kernel"], dtype)


def regulariser(cfg: Config, gpt: GPT) -> Callable[[int], None]:
    """To be called before every update with its number: sets the coefficient of `ffn.l1`."""
    if cfg["ffn"]["l1"] == 0:
        return lambda update: None
    return L1(gpt, coefficient=float(cfg["ffn"]["l1"]), warmup=cfg["ffn"]["l1_warmup"])


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
