"""Opposite neurons with a way down for each sign."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.ffn.paired import Paired


class TwoDowns(nn.Module):
    """[h+, h-] -> plus h+ + minus h-: one matrix per sign, at most one bias."""

    def __init__(self, n_plus: int, n_minus: int, d_model: int, *, bias: bool):
        super().__init__()
        self.plus = nn.Linear(n_plus, d_model, bias=bias)
        self.minus = nn.Linear(n_minus, d_model, bias=False)

    def forward(self, hidden: Float[Tensor, "... F"]) -> Float[Tensor, "... D"]:
        plus, minus = hidden.split([self.plus.in_features, self.minus.in_features], dim=-1)
        return self.plus(plus) + self.minus(minus)


class DualPath(Paired):
    """y = plus act(up x - C) + minus act(-(up x + C)): a way down for either side of each input vector.

    The same functions as `Paired`, whose `down` is [plus, minus] in one matrix: Muon makes one matrix
    orthogonal there and two here. Parameters: 1.5 D F.
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
        self.down = TwoDowns((d_ff + 1) // 2, d_ff // 2, d_model, bias="down" in bias)
