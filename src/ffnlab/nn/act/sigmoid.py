"""The logistic family: sigmoid, tanh, SiLU, Swish."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.act.base import Activation


class Sigmoid(Activation):
    """s(x) = 1 / (1 + exp(-x)): the gate of the original GLU (Dauphin et al., arXiv 1612.08083)."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return pre.sigmoid()


class Tanh(Activation):
    """(e^x - e^-x) / (e^x + e^-x) = 2 s(2x) - 1: odd, between -1 and 1."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return pre.tanh()


class SiLU(Activation):
    """x * s(x), Swish with beta = 1 (Ramachandran et al., arXiv 1710.05941). Lowest at x = -1.278."""

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.silu(pre)


class Swish(Activation):
    """x * s(beta x) with one learned beta per layer (Ramachandran et al., arXiv 1710.05941, section 4).

    beta = 0 is x/2, 1 is SiLU, large is ReLU; `beta` is where it starts.
    """

    def __init__(self, *, d_ff: int, beta: float):
        super().__init__(d_ff=d_ff)
        self.beta = nn.Parameter(torch.tensor(float(beta)))

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return pre * (self.beta * pre).sigmoid()
