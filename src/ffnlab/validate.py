"""Every problem of a configuration at once, before anything is built or written."""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ffnlab import build
from ffnlab.config import GROUPS, check, factory, packages, settings, unknown_key
from ffnlab.errors import UserError
from ffnlab.layers import FFN_MATRICES, SHARED_FFN, act_part, ffn_maker, ffn_part, matrices
from ffnlab.nn.ffn.width import MATCHES
from ffnlab.nn.gpt import ORDERS, ModelSettings
from ffnlab.nn.init import SCHEMES
from ffnlab.nn.residual import PLACEMENTS
from ffnlab.nn.share import SHARES
from ffnlab.record.checkpoint import CheckpointSettings
from ffnlab.train import TrainConfig

# Keys that every choice of a group has; build.py reads them itself.
SHARED: dict[str, dict[str, Any]] = {
    "ffn": SHARED_FFN,
    "data": {"seed": int, "val_frac": float, "test_frac": float},
}
SCALARS = {"seed": int, "out": str | None, "study": str | None, "arm": str | None, "plugins": list[str]}
RESIDUAL = {"attn": str, "ffn": str, "scale_init": float}
RESIDUAL |= dict.fromkeys(("scale", "ffn_scale", "carry", "ffn_carry"), float | str)
TOP = (
    *GROUPS,
    "seed",
    "out",
    "study",
    "arm",
    "plugins",
    "train",
    "checkpoint",
    "model",
    "probe",
    "residual",
    "stream",
)
# Key -> (lowest, highest) allowed number; lists are checked element by element, null is left to the types.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "data.seed": (0, 2**32 - 1),
    "data.val_frac": (0.0001, 0.9),
    "data.test_frac": (0, 0.9),
    "train.steps": (1, 10**9),
    "train.batch_size": (1, 2**16),
    "train.grad_accum": (1, 10**6),
    "train.clip": (1e-12, math.inf),
    "train.threads": (1, 4096),
    "train.log_every": (1, 10**9),
    "train.eval_every": (1, 10**9),
    "train.eval_batches": (1, 10**9),
    "model.seq_len": (2, 2**20),
    "model.d_model": (1, 2**16),
    "model.n_layers": (1, 1000),
    "model.n_heads": (1, 10**4),
    "model.softcap": (1e-6, math.inf),
    "model.pad_vocab_to": (1, 2**20),
    "model.dropout": (0, 0.999),
    "ffn.expansion": (0.25, 16),
    "ffn.expansion_by_layer": (0.25, 16),
    "ffn.d_ff": (1, 2**24),
    "ffn.dropout": (0, 0.999),
    "ffn.l1": (0, 1e6),
    "ffn.l1_warmup": (0, 10**9),
    "ffn.n_experts": (1, 10**4),
    "ffn.balance": (0, 1e6),
    "ffn.z_loss": (0, 1e6),
    "optim.lr": (1e-12, 1e6),
    "optim.lr_scale": (0, 1e6),
    "optim.weight_decay": (0, 1e3),
    "optim.momentum": (0, 0.999999),
    "optim.betas": (0, 0.999999),
    "optim.eps": (0, 1),
    "optim.ns_steps": (1, 50),
    "schedule.warmup_frac": (0, 1),
    "schedule.decay_frac": (0, 1),
    "schedule.floor": (0, 1),
    "threshold.init": (-1e6, 1e6),
    "attention.scale": (1e-6, 1e3),
    "attention.rope_base": (1, 1e12),
    "attention.rope_frac": (0, 1),
    "attention.n_kv_heads": (1, 10**4),
    "attention.window": (1, 2**20),
    "norm.eps": (0, 1),
    "norm_ffn.eps": (0, 1),
}
# `fit` builds these parts, so it waits until each of them is well-formed.
FIT_NEEDS = ("model", "attention", "ffn", "act", "threshold", "skip", "stream", "residual", "norm", "data")
FIT_NEEDS += ("tokenizer", "logger", "unknown key", "_target_")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "model.order": tuple(ORDERS),
    "optim.ns_precision": ("auto", "bf16", "fp32", None),
    "model.init": SCHEMES,
    "ffn.match": MATCHES,
    "ffn.share": SHARES,
    "residual.attn": tuple(PLACEMENTS),
    "residual.ffn": tuple(PLACEMENTS),
}


def validate(cfg: Mapping[str, Any]) -> None:
    """Raise one UserError with all problems: unknown keys, types, ranges, parts, sizes that do not fit."""
    problems = [unknown_key("", key, TOP) for key in cfg if key not in TOP]
    problems += [f"{key} is missing" for key in TOP if key not in cfg]
    if "${" in str(cfg.get("out")):
        problems.append(f"out={cfg['out']}: a folder's name cannot hold ${{")
    if not problems:
        problems = structure(cfg)
        problems += [
            line for path, bounds in RANGES.items() for line in outside(path, find(cfg, path), bounds)
        ]
        problems += [
            f"{path}={find(cfg, path)!r}: expected one of {', '.join(filter(None, names))}"
            for path, names in CHOICES.items()
            if find(cfg, path) not in names
        ]
        if not any(line.startswith(FIT_NEEDS) for line in problems):
            problems += fit(cfg)
    if problems:
        raise UserError(*dict.fromkeys(problems))


def structure(cfg: Mapping[str, Any]) -> list[str]:
    """Unknown or missing keys, wrong types, things that are not parts."""

    def part(node: Any, path: str, *given: str) -> Callable[[], Any]:
        return lambda: factory(node, path, given, packages(cfg))

    sizes = ("d_model", "n_layers")
    alike = ("tokenizer", "optim", "norm", "norm_ffn", "threshold", "logger")
    calls: list[Callable[[], Any]] = [
        lambda: check(SCALARS, {key: cfg[key] for key in SCALARS}, ""),
        lambda: check(RESIDUAL, mapping(cfg, "residual"), "residual"),
        lambda: settings(TrainConfig, cfg["train"], "train"),
        lambda: settings(CheckpointSettings, cfg["checkpoint"], "checkpoint"),
        lambda: settings(ModelSettings, cfg["model"], "model"),
        lambda: build.probe_settings(cfg),
        lambda: build.probes(cfg),
        *(partial(check_shared, cfg, group, hints) for group, hints in SHARED.items()),
        *(part(cfg[group], group) for group in alike),
        part(without(cfg["data"], build.SHARED_DATA), "data"),
        part(cfg["schedule"], "schedule", "steps"),
        part(cfg["skip"], "skip", *sizes),
        *(part(node, f"stream.{name}", *sizes) for name, node in mapping(cfg, "stream").items()),
        lambda: build.attention_part(cfg),
        lambda: ffn_part(cfg),
        lambda: act_part(cfg),
    ]
    return [line for call in calls for line in problems_of(call)]


def fit(cfg: Mapping[str, Any]) -> list[str]:
    """What only shows when sizes meet: heads, skips, layers, widths; nothing is allocated."""
    model = cfg["model"]
    layers = {
        "model.drop_attn": model["drop_attn"],
        "model.drop_ffn": model["drop_ffn"],
        "attention.long_layers": find(cfg, "attention.long_layers") or [],
        "model.value_embeddings": [layer for table in model["value_embeddings"] for layer in table],
    }
    problems = [
        f"{path}: layer {layer} does not exist; the layers are 0..{model['n_layers'] - 1}"
        for path, named in layers.items()
        for layer in named
        if not 0 <= layer < model["n_layers"]
    ]
    if model["order"] == "parallel" and "post" in (cfg["residual"]["attn"], cfg["residual"]["ffn"]):
        problems.append(
            "model.order=parallel with residual=post: a post-norm replaces the stream, which parallel "
            "sublayers share; expected pre, peri, out or none"
        )
    for key in RESIDUAL:
        kinds = {"scale": ("learned", "layerscale"), "carry": ("learned",)}.get(key.removeprefix("ffn_"), ())
        if kinds and isinstance(given := cfg["residual"][key], str) and given not in kinds:
            problems.append(f"residual.{key}={given!r}: expected a number or {' or '.join(kinds)}")
    if cfg["data"]["val_frac"] + cfg["data"]["test_frac"] >= 1:
        problems.append(
            "data.val_frac + data.test_frac: expected less than 1, so that text is left to train on"
        )
    tabled = layers["model.value_embeddings"]
    problems += [
        f"model.value_embeddings: layer {layer} stands in two tables"
        for layer in {*tabled}
        if tabled.count(layer) > 1
    ]
    problems += [
        f"model.value_embeddings: layer {layer} has no attention (model.drop_attn)"
        for layer in {*tabled} & {*model["drop_attn"]}
    ]
    if {*range(model["n_layers"])} <= {*model["drop_attn"]} & {*model["drop_ffn"]}:
        problems.append("model.drop_attn and model.drop_ffn leave no sublayer in any layer")
    if cfg["schedule"].get("warmup_frac", 0) + cfg["schedule"].get("decay_frac", 0) > 1:
        problems.append("schedule.warmup_frac + schedule.decay_frac: expected at most 1")
    if cfg["optim"].get("nesterov") and not cfg["optim"].get("momentum"):
        problems.append("optim.nesterov=true needs optim.momentum > 0")
    betas = cfg["optim"].get("betas")
    if isinstance(betas, list):
        problems += [] if len(betas) == 2 else [f"optim.betas={betas}: expected two numbers"]
    return problems or [line for call in trials(cfg) for line in problems_of(call)]


def trials(cfg: Mapping[str, Any]) -> list[Callable[[], Any]]:
    """Calls that build what depends on several sizes, on the meta device."""
    sizes = settings(ModelSettings, cfg["model"], "model")

    def on_meta(call: Callable[[], Any]) -> Callable[[], Any]:
        def tried() -> None:
            with torch.device("meta"), warnings.catch_warnings(action="ignore"):
                call()

        return tried

    return [
        lambda: matrices(cfg["ffn"]["bias"], FFN_MATRICES, "ffn.bias"),
        on_meta(lambda: build.attention_maker(cfg, sizes)(0)),
        on_meta(lambda: ffn_maker(cfg, sizes)(0)),
        on_meta(lambda: build.stream_parts(cfg, sizes, sizes.pad_vocab_to)),
        lambda: build.source(cfg),
        lambda: build.tokenizer(cfg),
        lambda: build.logger(cfg),
    ]


def problems_of(call: Callable[[], Any]) -> list[str]:
    """The problems of the UserError that `call` raises, if it raises one."""
    try:
        call()
    except UserError as error:
        return error.problems
    return []


def find(cfg: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where a choice of a group does not have the key."""
    node: Any = cfg
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def outside(path: str, value: Any, bounds: tuple[float, float]) -> list[str]:
    """One line for a number outside the bounds (both included)."""
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in outside(f"{path}.{key}", item, bounds)]
    if isinstance(value, list):
        return [line for item in value for line in outside(path, item, bounds)]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or bounds[0] <= value <= bounds[1]
    ):
        return []
    return [f"{path}={value}: expected a number from {bounds[0]:g} to {bounds[1]:g}"]


def mapping(cfg: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """cfg[path], empty where it is no mapping (which `structure` reports by another check)."""
    return cfg[path] if isinstance(cfg[path], Mapping) else {}


def without(node: Any, keys: tuple[str, ...]) -> Any:
    """A mapping without some keys; anything else as it is."""
    return {k: v for k, v in node.items() if k not in keys} if isinstance(node, Mapping) else node


def check_shared(cfg: Mapping[str, Any], group: str, hints: Mapping[str, Any]) -> None:
    """The shared keys of a group are there and fit their types."""
    check(hints, {k: v for k, v in mapping(cfg, group).items() if k in hints}, group)
