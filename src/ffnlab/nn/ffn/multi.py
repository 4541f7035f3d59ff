"""Several small FFNs in the place of a large one."""

from collections.abc import Callable
from functools import reduce
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FeedForward
from ffnlab.nn.ffn.mlp import MLP


class Multi(FeedForward):
    """n MLPs f_1 ... f_n that share F neurons as evenly as they can be shared. Parameters: 2 D F, as one MLP.

    mode=parallel:  y = f_1(x) + ... + f_n(x). Without biases this is one MLP of width F whose matrices are
    cut into n pieces: other functions cannot come of it, only other training (Muon makes each piece
    orthogonal).
    mode=sequence:  y_1 = f_1(x), y_i = y_{i-1} + f_i(x + y_{i-1}), y = y_n: each sees what the ones before it
    added. There is no norm between them, and a token passes n times as many layers.
    The question is the source's: do several small FFNs beat a large one (E85)?
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
        n: int,
        mode: Literal["parallel", "sequence"],
    ):
        super().__init__()
        if not 1 <= n <= d_ff:
            raise UserError(f"ffn.n={n}: expected a number of FFNs from 1 to d_ff={d_ff}")
        self.d_model, self.d_ff, self.mode = d_model, d_ff, mode
        widths = [d_ff // n + (i < d_ff % n) for i in range(n)]
        self.parts = nn.ModuleList(
            MLP(d_model=d_model, d_ff=width, make_act=make_act, bias=bias, dropout=dropout)
            for width in widths
        )

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        first, *others = self.parts
        if self.mode == "parallel":
            return reduce(lambda y, part: y + part(x), others, first(x))
        return reduce(lambda y, part: y + part(x + y), others, first(x))
