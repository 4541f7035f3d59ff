"""The plain two-matrix MLP."""

from jaxtyping import Float
from torch import Tensor

from ffnlab.nn.ffn.base import FFN


class MLP(FFN):
    """y = down act(up x) (Vaswani et al., arXiv 1706.03762, eq. 2). Parameters: 2 D F."""

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        return self.act(self.up(x))
