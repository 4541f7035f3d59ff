"""How a sublayer joins the residual stream: one class per placement of the norm.

x is the stream, f the branch (attention or FFN), s its scale and c what is carried on of the stream:

- s: a number; `learned`, one number per layer and sublayer; or `layerscale`, one per dimension (CaiT, Touvron
  et al., arXiv 2103.17239). The learned ones start at `scale_init`.
- c: a number, below 1 a decay of the stream (above 1: DeepNorm, arXiv 2203.00555); or `learned`, one number
  per layer and sublayer that starts at 1.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError

Branch = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """c x + s f(x): no norm at all, and the base of the placements below, which name their `norms`."""

    norms: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        *,
        d_model: int,
        scale: float | str,
        scale_init: float,
        carry: float | str,
        dropout: float,
    ):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.scale = factor("scale", scale, {"learned": (), "layerscale": (d_model,)}, scale_init)
        self.carry = factor("carry", carry, {"learned": ()}, 1.0)
        for name in self.norms:
            self.add_module(name, norm())

    def scaled(self, branch: Tensor) -> Tensor:
        """s dropout(branch); a fixed 1 costs nothing."""
        return times(self.scale, self.drop(branch))

    def carried(self, x: Tensor) -> Tensor:
        """c x."""
        return times(self.carry, x)

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        """What the sublayer adds to the stream."""
        return self.scaled(f(x))

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.carried(x) + self.branch(x, f)


def factor(
    name: str, given: float | str, shapes: dict[str, tuple[int, ...]], init: float
) -> float | nn.Parameter:
    """The number given, or a parameter of the shape of its kind, filled with `init`."""
    if isinstance(given, str):
        if given not in shapes:
            raise UserError(f"residual.{name}={given!r}: expected a number or {' or '.join(shapes)}")
        return nn.Parameter(torch.full(shapes[given], float(init)))
    return float(given)


def times(factor: float | Tensor, x: Tensor) -> Tensor:
    """factor * x; x itself for the number 1."""
    return x if isinstance(factor, float) and factor == 1.0 else factor * x


class PreNorm(Residual):
    """c x + s f(norm(x)): Xiong et al. 2020, arXiv 2002.04745."""

    norms = ("norm",)
    norm: nn.Module

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        return self.scaled(f(self.norm(x)))


class PostNorm(PreNorm):
    """norm(c x + s f(x)): Vaswani et al. 2017, arXiv 1706.03762. The network then has no final norm.

    It replaces the stream instead of adding to it, so it has no place in a block of parallel sublayers.
    """

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(self.carried(x) + self.scaled(f(x)))


class OutNorm(PreNorm):
    """c x + s norm(f(x)): the reordered norm of OLMo 2, arXiv 2501.00656."""

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        return self.scaled(self.norm(f(x)))


class PeriNorm(PreNorm):
    """c x + s norm_out(f(norm(x))): sandwich norm, Ding et al. 2021, arXiv 2105.13290."""

    norms = ("norm", "norm_out")
    norm_out: nn.Module

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        return self.scaled(self.norm_out(f(self.norm(x))))


PLACEMENTS: dict[str, type[Residual]] = {
    "pre": PreNorm,
    "post": PostNorm,
    "peri": PeriNorm,
    "out": OutNorm,
    "none": Residual,
}
