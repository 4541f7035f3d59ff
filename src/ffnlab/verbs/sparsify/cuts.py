"""The ways to leave out neurons, and how far each has to go for a given share to stay."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ffnlab.errors import UserError
from ffnlab.intervene import Change, collected, drop_small, keep_largest, lower
from ffnlab.probe.activity import has_exact_zeros
from ffnlab.probe.base import thresholds
from ffnlab.trained import Trained

METHODS = ("c", "eps", "top_k")


def allowed(trained: Trained, names: list[str], wanted: Sequence[str] | None) -> list[str]:
    """The ways that can be gone; `c` needs an activation that feels C and is exactly 0 below it."""
    found = [trained.model.get_submodule(name) for name in names]
    zeros = all(has_exact_zeros(act) for act in found)
    feels = not any(getattr(inner, "shift_invariant", False) for act in found for inner in act.modules())
    if wanted and "c" in wanted and not (zeros and feels):
        why = "takes up a threshold that all neurons share" if zeros else "is nowhere exactly 0"
        raise UserError(
            f"--method c: this run's activation {why}, so a higher one switches nothing off; use eps or top_k"
        )
    return list(wanted or (METHODS if zeros and feels else METHODS[1:]))


def calibration(trained: Trained, sites: dict[str, list[str]]) -> tuple[dict[str, Tensor], ...]:
    """By module, on the windows of the probe batch: how far each pre-activation lies above C (-inf where the
    neuron is not active), and the post-activations.
    """
    names = [name for found in sites.values() for name in found]
    windows, _ = trained.data.probe_tokens(1 if trained.data.n_val < 5 * trained.model.seq_len else 4)
    seen = []
    for side in ("input", "output"):
        with torch.no_grad(), collected(trained.model, names, side) as values, trained.precision():
            trained.model(windows.to(trained.device))
        seen.append({name: torch.cat(parts).float() for name, parts in values.items() if parts})
    pre, post = seen
    above = {}
    for name, values in pre.items():
        c = thresholds(trained.model, [name])
        above[name] = torch.where(post[name] != 0, values - (c[0] if c else 0), -torch.inf)
    return above, post


def cut(
    method: str,
    names: list[str],
    above: dict[str, Tensor],
    post: dict[str, Tensor],
    frac: float,
    active: float,
) -> dict[str, Change]:
    """The changes that leave the share `frac` of a layer's pairs; none where no more than that is active."""
    met = [name for name in names if name in post and len(post[name])]
    if frac >= active or not met:
        return {}
    if method == "top_k":
        return {name: partial(keep_largest, frac=frac) for name in names}
    if method == "eps":
        size = quantile(torch.cat([post[name].abs().flatten() for name in met]), 1 - frac)
        return {name: partial(drop_small, eps=size) for name in names}
    rise = max(0.0, quantile(torch.cat([above[name].flatten() for name in met]), 1 - frac))
    return {name: partial(lower, by=rise) for name in names}


def quantile(values: Tensor, share: float) -> float:
    """The value that the given share of `values` does not exceed."""
    rank = min(max(math.ceil(share * values.numel()), 1), values.numel())
    return values.kthvalue(rank).values.item()
