"""GELU, exact and in its tanh approximation (Hendrycks & Gimpel, arXiv 1606.08415), and its square."""

from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.act.base import Activation


class GELU(Activation):
    """x * Phi(x), Phi the standard normal distribution function: x/2 * (1 + erf(x / sqrt 2))."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.gelu(pre)


class GELUTanh(Activation):
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))): within 5e-4 of the exact GELU; GPT-2's form."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.gelu(pre, approximate="tanh")


class GELU2(Activation):
    """GELU(x)^2: Primer's squaring (So et al., arXiv 2109.08668) of another activation.

    Never negative; 0 only at x = 0, with a hump of height 0.029 at x = -0.752, where GELU is lowest.
    """

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.gelu(pre).square()
