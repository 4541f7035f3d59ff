"""How a sublayer joins the residual stream: one class per placement of the norm.

f is the branch (attention or FFN), s its scale: a number, or a learned scalar that starts at 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Branch = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """x + s f(x): no norm at all, and the base of the placements below."""

    def __init__(self, norm: Callable[[], nn.Module], *, scale: float | str, dropout: float):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(())) if scale == "learned" else float(scale)

    def scaled(self, branch: Tensor) -> Tensor:
        """s * dropout(branch); a fixed s = 1 costs nothing."""
        branch = self.drop(branch)
        return branch if isinstance(self.scale, float) and self.scale == 1.0 else self.scale * branch

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        """What the sublayer adds to the stream."""
        return self.scaled(f(x))

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + self.branch(x, f)


class PreNorm(Residual):
    """x + s f(norm(x)): Xiong et al. 2020, arXiv 2002.04745."""

    def __init__(self, norm: Callable[[], nn.Module], *, scale: float | str, dropout: float):
        super().__init__(norm, scale=scale, dropout=dropout)
        self.norm = norm()

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        return self.scaled(f(self.norm(x)))


class PostNorm(PreNorm):
    """norm(x + s f(x)): Vaswani et al. 2017, arXiv 1706.03762. The network then has no final norm.

    It adds nothing to the stream but replaces it, so it has no place in a block of parallel sublayers.
    """

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(x + self.scaled(f(x)))


class OutNorm(PreNorm):
    """x + s norm(f(x)): the reordered norm of OLMo 2, arXiv 2501.00656."""

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        return self.scaled(self.norm(f(x)))


class PeriNorm(PreNorm):
    """x + s norm_out(f(norm(x))): sandwich norm, Ding et al. 2021, arXiv 2105.13290."""

    def __init__(self, norm: Callable[[], nn.Module], *, scale: float | str, dropout: float):
        super().__init__(norm, scale=scale, dropout=dropout)
        self.norm_out = norm()

    def branch(self, x: Tensor, f: Branch) -> Tensor:
        return self.scaled(self.norm_out(f(self.norm(x))))


PLACEMENTS: dict[str, type[Residual]] = {
    "pre": PreNorm,
    "post": PostNorm,
    "peri": PeriNorm,
    "out": OutNorm,
    "none": Residual,
}
