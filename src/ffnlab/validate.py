"""Every problem of a configuration at once, before anything is built or written."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ffnlab import build
from ffnlab.config import GROUPS, check, factory, fits, packages, settings, unknown_key
from ffnlab.errors import UserError
from ffnlab.layers import FFN_MATRICES, SHARED_FFN, act_part, ffn_maker, ffn_part, matrices
from ffnlab.nn.gpt import ModelSettings
from ffnlab.ranges import find, out_of_range
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
# `fit` builds these parts, so it waits until each of them is well-formed.
FIT_NEEDS = ("model", "attention", "ffn", "act", "threshold", "skip", "stream", "residual", "norm", "data")
FIT_NEEDS += ("tokenizer", "logger", "unknown key", "_target_")


def validate(cfg: Mapping[str, Any]) -> None:
    """Raise one UserError with all problems: unknown keys, types, ranges, parts, sizes that do not fit."""
    problems = [unknown_key("", key, TOP) for key in cfg if key not in TOP]
    problems += [f"{key} is missing" for key in TOP if key not in cfg]
    if "${" in str(cfg.get("out")):
        problems.append(f"out={cfg['out']}: a folder's name cannot hold ${{")
    if not problems:
        problems = structure(cfg)
        problems += out_of_range(cfg)
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
    shares = [cfg["schedule"].get(key, 0) for key in ("warmup_frac", "decay_frac")]
    if all(fits(share, float) for share in shares) and sum(shares) > 1:
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


def mapping(cfg: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """cfg[path], empty where it is no mapping (which `structure` reports by another check)."""
    return cfg[path] if isinstance(cfg[path], Mapping) else {}


def without(node: Any, keys: tuple[str, ...]) -> Any:
    """A mapping without some keys; anything else as it is."""
    return {k: v for k, v in node.items() if k not in keys} if isinstance(node, Mapping) else node


def check_shared(cfg: Mapping[str, Any], group: str, hints: Mapping[str, Any]) -> None:
    """The shared keys of a group are there and fit their types."""
    check(hints, {k: v for k, v in mapping(cfg, group).items() if k in hints}, group)
