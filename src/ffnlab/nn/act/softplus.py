"""Softplus and what is made of it."""

from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.act.base import Activation


class Softplus(Activation):
    """log(1 + exp(beta x)) / beta: a smooth ReLU, always positive (Dugas et al. 2001); ReLU as beta grows."""

    def __init__(self, *, d_ff: int, beta: float):
        super().__init__(d_ff=d_ff)
        if beta <= 0:
            raise UserError(f"act.beta={beta}: expected a number above 0")
        self.beta = beta

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.softplus(pre, beta=self.beta)


class Softplus2(Softplus):
    """(log(1 + exp(beta x)) / beta)^2: a smooth ReLU^2 that stays positive; ReLU^2 as beta grows.

    The squaring is Primer's (So et al., arXiv 2109.08668); `smooth_relu2` is the algebraic smoothing.
    """

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return super().forward(pre).square()


class Mish(Activation):
    """x * tanh(log(1 + exp(x))) (Misra, arXiv 1908.08681). Lowest, -0.309, at x = -1.192."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.mish(pre)
