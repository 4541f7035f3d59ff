"""Neurons that start in opposite pairs."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.ffn.base import FFN


class MirroredLinear(nn.Linear):
    """A Linear whose second half of rows starts as the negative of its first; nothing holds them together."""

    def start(self, draw: Callable[[torch.Size], Tensor]) -> Tensor:
        """The weight before training: as many rows as `Paired` has, then the same rows negated."""
        half = draw(torch.Size(((self.out_features + 1) // 2, self.in_features)))
        return torch.cat([half, -half])[: self.out_features]


class PairedInit(FFN):
    """y = down act(up x), up = [V, -V] at the start and free afterwards. Parameters: 2 D F.

    Untrained it is `Paired` with the same seed, to the bit. Source: the ReLU^2 study, slightly worse than the
    plain MLP (E36).
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
        self.up = MirroredLinear(d_model, d_ff, bias="up" in bias)

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        return self.act(self.up(x))
