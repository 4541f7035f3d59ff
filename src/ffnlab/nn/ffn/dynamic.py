"""An FFN whose width each token chooses."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FFN
from ffnlab.nn.penalty import Penalised


class Width(Penalised):
    """x -> the share of the neurons that the token keeps, s = sigmoid(w . x + b); evaluated, s is rounded to
    whole neurons.

    Wants budget * (mean of s over the tokens - target)^2 to be small.
    """

    def __init__(self, d_model: int, d_ff: int, *, target: float, budget: float):
        super().__init__()
        self.d_ff, self.target, self.budget = d_ff, target, budget
        self.controller = nn.Linear(d_model, 1)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... 1"]:
        share = self.controller(x).sigmoid()
        if not self.training:
            return (share * self.d_ff).round() / self.d_ff
        self.penalty = self.budget * (share.mean() - self.target).square()
        return share


class KeepFirst(nn.Module):
    """act(pre) * m with m_j = sigmoid((s F - j - 1/2) / (temperature F)); evaluated, m_j = 1 for j < s F,
    else 0. The neurons that are cut off are inactive to the probes, and a threshold inside is theirs to see.
    """

    def __init__(self, act: nn.Module, d_ff: int, *, temperature: float):
        super().__init__()
        self.act, self.d_ff, self.temperature = act, d_ff, temperature
        self.exact_zeros = bool(getattr(act, "exact_zeros", False))

    @property
    def threshold(self) -> Tensor | None:
        """The C of the activation, where it has one."""
        return getattr(self.act, "threshold", None)

    def forward(self, pre: Float[Tensor, "... F"], share: Float[Tensor, "... 1"]) -> Float[Tensor, "... F"]:
        inside = share * self.d_ff - torch.arange(self.d_ff, device=pre.device) - 0.5
        mask = (inside / (self.temperature * self.d_ff)).sigmoid() if self.training else inside > 0
        return self.act(pre) * mask.to(pre.dtype)


class Dynamic(FFN):
    """y = down(m(x) * act(up x)), where a controller keeps the first k(x) neurons. Parameters: 2 D F + D + 1.

    Trained with a soft edge of width `temperature` (in shares of F), which carries the gradient to the
    controller, and a budget that pulls the mean kept share to `target`; evaluated with whole neurons.
    `ffn/L03/width_frac` is the mean share k/F: that share of 4 D F FLOPs is needed, the rest is multiplied by
    zero here. The idea is E75's. The source's own code cannot run: it takes int() of a tensor, reads an
    attribute that it never sets, has no way down, and gives the controller no gradient.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
        target: float,
        budget: float,
        temperature: float,
    ):
        problems = [] if 0 < target <= 1 else [f"ffn.target={target}: expected a share above 0, at most 1"]
        problems += [] if budget >= 0 else [f"ffn.budget={budget}: expected a number of at least 0"]
        problems += [] if temperature > 0 else [f"ffn.temperature={temperature}: expected a number above 0"]
        if problems:
            raise UserError(*problems)
        super().__init__(d_model=d_model, d_ff=d_ff, make_act=make_act, bias=bias, dropout=dropout)
        self.act = KeepFirst(self.act, d_ff, temperature=temperature)
        self.width = Width(d_model, d_ff, target=target, budget=budget)

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        return self.act(self.up(x), self.width(x))
