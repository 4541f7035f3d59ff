"""An FFN whose matrices are products of two thin ones."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FFN


class ScaleKeepingLinear(nn.Linear):
    """A Linear that starts with entries of sd 1/sqrt(in) under every `model.init`: what it puts out has the
    root mean square of what it gets, so the matrix behind it starts as it would without it.
    """

    def start(self, draw: Callable[[torch.Size], Tensor]) -> Tensor:
        weight = draw(self.weight.shape)
        return weight / (weight.square().mean().sqrt() * math.sqrt(self.in_features))


class LowRankLinear(nn.Module):
    """x -> out(into(x)): a matrix (n_out, n_in) of rank r, r (n_in + n_out) parameters."""

    def __init__(self, n_in: int, n_out: int, rank: int, *, bias: bool):
        super().__init__()
        self.into = ScaleKeepingLinear(n_in, rank, bias=False)
        self.out = nn.Linear(rank, n_out, bias=bias)

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        return self.out(self.into(x))


class LowRank(FFN):
    """y = down act(up x) with up = U2 U1 and down = D2 D1 of rank r = `rank_frac` * min(D, F). Parameters:
    2 r (D + F). At equal parameters it is wider: r = D/2 gives F = 2 F0 - D, where the MLP has F0.

    Low-rank training of FFNs: Wei et al., arXiv 2407.09835.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
        rank_frac: float,
    ):
        if not 0 < rank_frac <= 1:
            raise UserError(f"ffn.rank_frac={rank_frac}: expected a number above 0 and at most 1")
        super().__init__(d_model=d_model, d_ff=d_ff, make_act=make_act, bias=bias, dropout=dropout)
        rank = max(1, round(rank_frac * min(d_model, d_ff)))
        self.up = LowRankLinear(d_model, d_ff, rank, bias="up" in bias)
        self.down = LowRankLinear(d_ff, d_model, rank, bias="down" in bias)

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        return self.act(self.up(x))
