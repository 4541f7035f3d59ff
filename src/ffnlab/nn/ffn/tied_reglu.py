"""The ReLU-gated linear unit whose gate is its input."""

from jaxtyping import Float
from torch import Tensor

from ffnlab.nn.ffn.base import FFN


class TiedReGLU(FFN):
    """y = down(ReLU(up x) * up x): ReGLU with gate = up, which is the ReLU^2 MLP (E43). Parameters: 2 D F.

    For any activation a it is the MLP with x a(x): SiLU for the sigmoid, x^2 for the identity. With a
    threshold C it is ReLU(x - C) * x, which has a kink at C, where ReLU(x - C)^2 has none.
    """

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        pre = self.up(x)
        return self.act(pre) * pre
