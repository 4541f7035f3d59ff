"""The FFN of every layer: made from a plain configuration (width, activation, threshold), and found again."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from ffnlab.config import factory, packages
from ffnlab.errors import UserError
from ffnlab.nn.absent import Absent
from ffnlab.nn.ffn.base import FeedForward
from ffnlab.nn.ffn.width import solve_width
from ffnlab.nn.gpt import ModelSettings
from ffnlab.probe.base import layers

Config = Mapping[str, Any]
FFN_MATRICES = frozenset({"up", "gate", "down"})
# Keys of train.yaml's `ffn` with their types; all other keys of the group are options of the variant.
SHARED_FFN: dict[str, Any] = {
    "expansion": float,
    "expansion_by_layer": list[float] | None,
    "match": str,
    "d_ff": int | None,
    "bias": bool | list[str],
    "dropout": float,
    "share": str,
    "extra": bool,
    "l1": float,
    "l1_warmup": int,
    "kernel": str,
}


def is_absent(node: Any) -> bool:
    """Whether a choice is `none`: no sublayer at all."""
    return isinstance(node, Mapping) and node.get("_target_") == f"{Absent.__module__}.{Absent.__qualname__}"


def ffn_part(cfg: Config) -> partial[FeedForward]:
    """The FFN class with its own options."""
    own = {key: value for key, value in dict(cfg["ffn"] or {}).items() if key not in SHARED_FFN}
    given = ("d_model", "d_ff", "make_act", "bias", "dropout", "seq_len")
    return factory(own, "ffn", given, packages(cfg))


def act_part(cfg: Config) -> partial[nn.Module]:
    """The activation class with its own options."""
    return factory(cfg["act"], "act", ("d_ff",), packages(cfg))


def ffn_maker(cfg: Config, sizes: ModelSettings) -> Callable[[int], nn.Module]:
    """layer -> a new FFN of that layer's width, with its own activation and threshold."""
    if is_absent(cfg["ffn"]):
        return lambda layer: Absent()
    node = cfg["ffn"]
    bias = matrices(node["bias"], FFN_MATRICES, "ffn.bias")
    part = ffn_part(cfg)
    make = partial(part, d_model=sizes.d_model, bias=bias, dropout=float(node["dropout"]))
    if "seq_len" in inspect.signature(part.func).parameters:  # few variants depend on the context
        make = partial(make, seq_len=sizes.seq_len)
    act = act_part(cfg)
    threshold = factory(cfg["threshold"], "threshold", packages=packages(cfg))()
    if getattr(act.func, "shift_invariant", False) and getattr(threshold, "scope", "neuron") != "neuron":
        warnings.warn(
            "act ignores a threshold that all neurons share: give threshold.scope=neuron", stacklevel=2
        )
    widths = layer_widths(node, partial(make, make_act=lambda width: act(d_ff=width)), sizes, bias)
    return lambda layer: make(d_ff=widths[layer], make_act=lambda width: threshold(act(d_ff=width), width))


def layer_widths(
    node: Config, bare: Callable[..., FeedForward], sizes: ModelSettings, bias: frozenset[str]
) -> list[int]:
    """d_ff of every layer: `ffn.d_ff`, else solved for the layer's own expansion or that of all."""
    if node["d_ff"] is not None:
        warnings.warn(
            f"ffn.d_ff={node['d_ff']} is given: ffn.expansion and ffn.match are ignored",
            stacklevel=2,
        )
        return [node["d_ff"]] * sizes.n_layers
    wanted = layer_expansions(node, sizes.n_layers)

    def solve(expansion: float) -> int:
        return solve_width(lambda width: bare(d_ff=width), sizes.d_model, expansion, node["match"], bias)

    solved = {expansion: solve(expansion) for expansion in dict.fromkeys(wanted)}
    if node["share"] != "none" and len(set(solved.values())) > 1:
        raise UserError(
            f"ffn.share={node['share']} with ffn.expansion_by_layer={node['expansion_by_layer']}: "
            "layers of different widths have no weights in common"
        )
    return [solved[expansion] for expansion in wanted]


def layer_expansions(node: Config, n_layers: int) -> list[float]:
    """The expansion of every layer."""
    by_layer = node["expansion_by_layer"]
    if by_layer is None:
        return [float(node["expansion"])] * n_layers
    if len(by_layer) != n_layers:
        raise UserError(
            f"ffn.expansion_by_layer has {len(by_layer)} numbers; expected one for each of the "
            f"{n_layers} layers (model.n_layers)"
        )
    return [float(expansion) for expansion in by_layer]


def matrices(choice: Any, names: frozenset[str], path: str) -> frozenset[str]:
    """`bias`: true is every matrix, false none, a list those named."""
    named = choice if isinstance(choice, list) else [] if choice in (None, False) else [choice]
    chosen = names if choice is True else frozenset(map(str, named))
    if not chosen <= names:
        raise UserError(f"{path}={choice!r}: expected true, false or a list of {', '.join(sorted(names))}")
    return chosen


def ffns(model: nn.Module) -> dict[str, FeedForward]:
    """The FFNs by layer; one of a user's own class is left out."""
    found = layers(name for name, _ in model.named_modules(remove_duplicate=False))
    parts = {label: model.get_submodule(".".join(acts[0].split(".")[:3])) for label, acts in found.items()}
    return {label: part for label, part in parts.items() if isinstance(part, FeedForward)}
