"""The logistic family: sigmoid and SiLU."""

from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.act.base import Activation


class Sigmoid(Activation):
    """s(x) = 1 / (1 + exp(-x)): the gate of the original GLU (Dauphin et al., arXiv 1612.08083)."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return pre.sigmoid()


class SiLU(Activation):
    """x * s(x), also called Swish (Ramachandran et al., arXiv 1710.05941). Lowest at x = -1.278."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.silu(pre)
