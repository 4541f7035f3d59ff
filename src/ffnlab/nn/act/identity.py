"""No activation."""

from jaxtyping import Float
from torch import Tensor

from ffnlab.nn.act.base import Activation


class Identity(Activation):
    """x itself: a two-matrix MLP becomes one linear map of rank min(D, F). The control of all others."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return pre
