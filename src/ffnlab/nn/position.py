"""Where a token stands: rotation of queries and keys, or a vector added to the embedding.

Axes: B batch, T position, H heads, K d_head, D d_model.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.nn.stream import StreamPart


class Rope(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): pair (x_k, x_{k+K/2}) turns by the angle t *
    base^(-2k/K).

    `frac` < 1 rotates only the first (fastest) share of the pairs; `base` then spans those.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, *, d_head: int, seq_len: int, base: float, frac: float):
        super().__init__()
        half = d_head // 2
        turning = round(half * frac)
        speed = torch.zeros(half)
        speed[:turning] = base ** -(torch.arange(turning) / max(turning, 1))
        angle = torch.outer(torch.arange(seq_len).float(), speed)  # (T, K/2)
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], dim=-1), persistent=False)

    def forward(self, x: Float[Tensor, "B H T K"], start: int = 0) -> Float[Tensor, "B H T K"]:
        end = start + x.shape[-2]
        cos, sin = self.cos[start:end].to(x.dtype), self.sin[start:end].to(x.dtype)
        half = x.shape[-1] // 2
        return x * cos + torch.cat([x[..., half:], x[..., :half]], dim=-1) * sin


class LearnedPosition(StreamPart):
    """x_t <- x_t + p_t before block 0, p learned (GPT-2)."""

    def __init__(self, *, d_model: int, seq_len: int, tied: bool):
        super().__init__()
        self.table = nn.Embedding(seq_len, d_model)

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        return x + self.table.weight[ctx.start :][: x.shape[1]] if i == 0 else x


class SinusoidalPosition(StreamPart):
    """x_t <- s x_t + p_t before block 0; p_t[2k], p_t[2k+1] = sin, cos of t / 10000^(2k/D) (arXiv
    1706.03762, 3.5).

    s is sqrt(D) where the embedding is the head too and starts at sd 1/sqrt(D), as there (3.4), else 1.
    """

    table: Tensor

    def __init__(self, *, d_model: int, seq_len: int, tied: bool):
        super().__init__()
        speed = 10000.0 ** -(torch.arange(0, d_model, 2) / d_model)
        angle = torch.outer(torch.arange(seq_len).float(), speed)
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model]
        self.register_buffer("table", table, persistent=False)
        self.factor = math.sqrt(d_model) if tied else 1.0

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        return self.factor * x + self.table[ctx.start :][: x.shape[1]] if i == 0 else x


ADDED_POSITIONS: dict[str, type[LearnedPosition] | type[SinusoidalPosition]] = {
    "learned": LearnedPosition,
    "sinusoidal": SinusoidalPosition,
}
POSITIONS = ("rope", *ADDED_POSITIONS, "none")
