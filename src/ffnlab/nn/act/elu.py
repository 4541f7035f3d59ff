"""Exponential on the left of 0: ELU, SELU, xIELU."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.act.base import Activation


class ELU(Activation):
    """x for x > 0, else `alpha` (e^x - 1) (Clevert et al., arXiv 1511.07289)."""

    def __init__(self, *, d_ff: int, alpha: float):
        super().__init__(d_ff=d_ff)
        self.alpha = alpha

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.elu(pre, self.alpha)


class SELU(Activation):
    """1.0507 x for x > 0, else 1.0507 * 1.6733 (e^x - 1): mean 0 and variance 1 are its fixed point
    (Klambauer et al., arXiv 1706.02515).
    """

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.selu(pre)


class XIELU(Activation):
    """a x^2 + beta x for x > 0, else b (e^x - 1 - x) + beta x (Huang & Schlag, arXiv 2411.13010).

    a = softplus(alpha_p) and b = beta + softplus(alpha_n), one of each learned per layer; `positive` and
    `negative` are where a and b start. b > beta makes the slope negative far out, so it is not monotone.
    """

    def __init__(self, *, d_ff: int, positive: float, negative: float, beta: float):
        super().__init__(d_ff=d_ff)
        if positive <= 0 or negative <= beta:
            raise UserError(
                f"act.positive={positive}, act.negative={negative}, act.beta={beta}: "
                "expected positive > 0 and negative > beta"
            )
        self.beta = beta
        self.alpha_p = nn.Parameter(torch.tensor(inverse_softplus(positive)))
        self.alpha_n = nn.Parameter(torch.tensor(inverse_softplus(negative - beta)))

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        a = nn.functional.softplus(self.alpha_p)
        b = self.beta + nn.functional.softplus(self.alpha_n)
        left = pre.clamp(max=0)  # e^x of a large x would be inf, and 0 * inf is not a number
        return torch.where(pre > 0, a * pre.square(), b * (left.expm1() - left)) + self.beta * pre


def inverse_softplus(y: float) -> float:
    """x with log(1 + e^x) = y > 0."""
    return math.log(math.expm1(y))
