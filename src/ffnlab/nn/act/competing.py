"""Activations in which the neurons of a token compete: an output depends on all F pre-activations."""

from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.act.base import Activation


class SoLU(Activation):
    """x * softmax(x), the softmax over the neurons of a token (Elhage et al. 2022, Softmax Linear Units,
    transformer-circuits.pub).

    The shares add up to 1, so that outputs are about F times smaller than those of SiLU; the paper trains it
    with a norm behind it, which is `solu_norm`.
    """

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return pre * pre.softmax(-1).to(pre.dtype)


class SoLUNorm(SoLU):
    """LayerNorm(x * softmax(x)), with gain and bias: the form that the paper trains.

    What the probes call the post-activation is what comes out of the norm.
    """

    def __init__(self, *, d_ff: int, eps: float):
        super().__init__(d_ff=d_ff)
        self.norm = nn.LayerNorm(d_ff, eps=eps)

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return self.norm(super().forward(pre).to(self.norm.weight.dtype)).to(pre.dtype)


class Selective(Activation):
    """Base: `active_frac` of the F neurons may be active on a token."""

    exact_zeros = True

    def __init__(self, *, d_ff: int, active_frac: float):
        super().__init__(d_ff=d_ff)
        if not 0 < active_frac < 1:
            raise UserError(f"act.active_frac={active_frac}: expected a number between 0 and 1")
        self.active_frac = active_frac


class TopK(Selective):
    """max(0, x) for the k largest pre-activations of a token, 0 for the others; k = `active_frac` F, at least
    1 (k-winners-take-all, Xiao et al., arXiv 1905.10510; with the ReLU: Gao et al., arXiv 2406.04093).

    No gradient reaches the others. At most k neurons are active, fewer where fewer are positive.
    """

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        k = max(1, round(self.active_frac * pre.shape[-1]))
        largest, neuron = pre.topk(k, dim=-1, sorted=False)
        return torch.zeros_like(pre).scatter(-1, neuron, largest.relu())


class Quantile(Selective):
    """max(0, x - q), q = mean + z sd over the token's neurons: the quantile above which `active_frac` of a
    normal distribution lies (statistical top-k: Spark Transformer, arXiv 2506.06644; Gemma 3n).

    No sorting, and the gradient passes through q as well. q takes up whatever is added to all neurons alike,
    so that a threshold C of a layer or a model in front has no effect.
    """

    shift_invariant = True

    def __init__(self, *, d_ff: int, active_frac: float):
        super().__init__(d_ff=d_ff, active_frac=active_frac)
        self.z = NormalDist().inv_cdf(1 - active_frac)

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        sd, mean = torch.std_mean(pre, dim=-1, correction=0, keepdim=True)
        return nn.functional.relu(pre - (mean + self.z * sd))
