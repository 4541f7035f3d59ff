"""Neurons in opposite pairs."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.ffn.base import FFN


class Paired(FFN):
    """y = down act([up x, -up x]): neuron j + F/2 sees the negative of what neuron j sees.

    One input vector serves two neurons, so `up` is (F/2, D): half of the input products, 3/4 of the MLP's
    parameters at equal width, 1.5 D F in all (an odd F leaves the last input vector without its opposite).
    With C = 0 exactly one neuron of each pair is active on every token; with C = c > 0 there is a gap of 2c
    in which none is. Source: the ReLU^2 study in modded-nanogpt, where it trained worse (E34, E35).
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
    ):
        super().__init__(d_model=d_model, d_ff=d_ff, make_act=make_act, bias=bias, dropout=dropout)
        self.up = nn.Linear(d_model, (d_ff + 1) // 2, bias="up" in bias)

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        pre = self.up(x)
        return self.act(torch.cat([pre, -pre], dim=-1)[..., : self.d_ff])
