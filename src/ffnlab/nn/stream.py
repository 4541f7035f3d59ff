"""Parts that touch the residual stream between blocks: `before(i, x, ctx)` and `after(i, x, ctx)` around
block i.

Sources: modded-nanogpt record 42 (2025-10-27) for all of them; the formulas stand at each class.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.norm import rms_norm


class StreamPart(nn.Module):
    """Base: leaves the stream as it is."""

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        return x

    def after(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        return x


class EmbedNorm(StreamPart):
    """x <- x / rms(x) before block 0, no gain."""

    def __init__(self, *, d_model: int, n_layers: int):
        super().__init__()

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        return rms_norm(x, 1e-6) if i == 0 else x


class EmbedDropout(StreamPart):
    """Dropout of the stream that enters block 0, positions added (arXiv 1706.03762, 5.4)."""

    def __init__(self, p: float):
        super().__init__()
        self.drop = nn.Dropout(p)

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        return self.drop(x) if i == 0 else x


class X0Lambdas(StreamPart):
    """Before block i: x <- a_i x + b_i x0, where x0 is the stream that entered block 0; a = 1 and b = 0 at
    the start.
    """

    def __init__(self, *, d_model: int, n_layers: int):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(n_layers, 1))  # (layer, (a, b))

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        if i == 0:
            ctx.x0 = x
        return self.lambdas[i, 0] * x + self.lambdas[i, 1] * ctx.x0

    def values(self) -> dict[str, Tensor]:
        """`L03/x` and `L03/x0` for every layer."""
        rows = self.lambdas.detach()
        return {f"L{i:02d}/{key}": rows[i, j] for i in range(len(rows)) for j, key in enumerate(("x", "x0"))}


class Backout(StreamPart):
    """After the last block: x <- x - beta * (the stream after block `layer`); None: block round(2n/3), which
    is 8 of 12.
    """

    def __init__(self, *, d_model: int, n_layers: int, layer: int | None, init: float):
        super().__init__()
        self.layer = round(2 * n_layers / 3) if layer is None else layer
        if not 0 <= self.layer < n_layers:
            raise UserError(f"stream.backout.layer={layer}: expected a layer in 0..{n_layers - 1}")
        self.last = n_layers - 1
        self.beta = nn.Parameter(torch.tensor(float(init)))

    def after(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        if i == self.layer:
            ctx.saved["backout"] = x
        return x - self.beta * ctx.saved["backout"] if i == self.last else x

    def values(self) -> dict[str, Tensor]:
        return {"backout": self.beta.detach()}


class Smear(StreamPart):
    """e_t <- e_t + s * sigmoid(w . e_t[:12]) * e_{t-1} before block 0: a token sees a little of the one
    before it. s = 0, w = 0 at the start.
    """

    def __init__(self, *, d_model: int, n_layers: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(min(12, d_model)))
        self.s = nn.Parameter(torch.zeros(()))

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        if i != 0:
            return x
        before = ctx.exchange("smear", x[:, -1:])
        if before is None:
            gate = self.s * torch.sigmoid(x[:, 1:, : len(self.w)] @ self.w)
            return torch.cat([x[:, :1], x[:, 1:] + gate.unsqueeze(-1) * x[:, :-1]], dim=1)
        return x + self.s * torch.sigmoid(x[..., : len(self.w)] @ self.w).unsqueeze(-1) * before

    def values(self) -> dict[str, Tensor]:
        return {"smear": self.s.detach()}


class ValueEmbeddings(StreamPart):
    """Tables of value embeddings: block i reads table k where i stands in `tables[k]`; its attention mixes
    them into v, whose width is `d_value`.
    """

    def __init__(self, *, tables: list[list[int]], vocab_size: int, d_value: int):
        super().__init__()
        self.table_of = {layer: k for k, layers in enumerate(tables) for layer in layers}
        self.tables = nn.ModuleList(nn.Embedding(vocab_size, d_value) for _ in tables)

    def before(self, i: int, x: Tensor, ctx: Any) -> Tensor:
        if i in self.table_of:
            ctx.values[i] = self.tables[self.table_of[i]](ctx.tokens)
        return x
