"""The width of a feed-forward layer, so that variants of unlike shape cost the same."""

from collections.abc import Callable

import torch

from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FeedForward

MATCHES = ("params", "flops", "width")
TOLERANCE = 0.01


def solve_width(
    make: Callable[[int], FeedForward],
    d_model: int,
    expansion: float,
    match: str,
    bias: frozenset[str] = frozenset(),
) -> int:
    """The d_ff at which `make(d_ff)` costs as much as the plain MLP of width round(expansion * d_model).

    `match` says what cost is: "params" (with the same biases) or "flops" (of the matrix products, per token);
    "width" asks for that width itself. The result is a multiple of 8 if one is within 1 % of the cost, else
    of 4, of 2, or the nearest whole number. Example: d_model 768, expansion 4, SwiGLU -> 2048 (8/3 * 768).
    Nothing is allocated: `make` is called on the meta device. Cost must grow with d_ff.
    """
    plain = max(1, round(expansion * d_model))
    if match == "width":
        return plain
    if match not in MATCHES:
        raise UserError(f"ffn.match is {match!r}; expected one of {', '.join(MATCHES)}.")
    if match == "params":
        target = 2 * d_model * plain + ("up" in bias) * plain + ("down" in bias) * d_model
    else:
        target = 4 * d_model * plain

    def cost(d_ff: int) -> int:
        with torch.device("meta"):
            ffn = make(d_ff)
        return ffn.matched_parameters() if match == "params" else ffn.flops_per_token()

    below = largest(lambda d_ff: cost(d_ff) <= target, upper=16 * plain)
    for multiple in (8, 4, 2, 1):
        floor = below // multiple * multiple
        candidates = [d_ff for d_ff in (floor, floor + multiple) if d_ff > 0]
        width = min(candidates, key=lambda d_ff: abs(cost(d_ff) - target))
        if abs(cost(width) - target) <= TOLERANCE * target:
            break
    return width


def largest(holds: Callable[[int], bool], upper: int) -> int:
    """The largest n in 0..upper for which `holds`, true up to some n and false beyond; 0 counts as true."""
    low, high = 0, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
