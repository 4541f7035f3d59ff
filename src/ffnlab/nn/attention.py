"""Causal self-attention on PyTorch's scaled_dot_product_attention.

Axes: B batch, T position, D d_model, H heads, K d_head = D/H.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.norm import rms_norm
from ffnlab.nn.position import POSITIONS, Rope

PLAIN_UP_TO = 512  # window up to which `attend` multiplies plainly in bf16 on a CPU
GATE_INPUTS = 12  # dimensions of the stream that a head's gate reads


class Causal(nn.Module):
    """softmax(mask(s q k^T)) v per head, then `out`; s = `scale` or 1/sqrt(K).

    qk_norm: q, k <- q / rms(q), k / rms(k) per head, before the rotation, no gain. Where the block has value
    embeddings
    e (B T D): v <- l1 v + l2 e, l1 = l2 = 0.5 at the start. gate: head h times sigmoid(w_h . x[:12]), w = 0
    at the start.
    q, k, v, out are separate matrices: Muon on a fused one would be another optimizer.
    """

    def __init__(
        self,
        *,
        layer: int,
        d_model: int,
        n_heads: int,
        seq_len: int,
        dropout: float,
        value_embedding: bool,
        position: str,
        rope_base: float,
        rope_frac: float,
        qk_norm: bool,
        bias: frozenset[str],
        scale: float | None,
        gate: bool,
    ):
        super().__init__()
        check(d_model, n_heads, position)
        self.layer, self.n_heads, self.dropout, self.scale, self.qk_norm = (
            layer,
            n_heads,
            dropout,
            scale,
            qk_norm,
        )
        self.q = nn.Linear(d_model, d_model, bias="q" in bias)
        self.k = nn.Linear(d_model, d_model, bias="k" in bias)
        self.v = nn.Linear(d_model, d_model, bias="v" in bias)
        self.out = nn.Linear(d_model, d_model, bias="out" in bias)
        rope = {"d_head": d_model // n_heads, "seq_len": seq_len, "base": rope_base, "frac": rope_frac}
        self.rotate = Rope(**rope) if position == "rope" else nn.Identity()
        self.value_lambdas = nn.Parameter(torch.full((2,), 0.5)) if value_embedding else None
        self.gate_w = nn.Parameter(torch.zeros(n_heads, min(GATE_INPUTS, d_model))) if gate else None

    def forward(self, x: Float[Tensor, "B T D"], ctx: Any) -> Float[Tensor, "B T D"]:
        v = self.v(x)
        if self.value_lambdas is not None:
            v = self.value_lambdas[0] * v + self.value_lambdas[1] * ctx.values[self.layer]
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in (self.q(x), self.k(x), v))
        if self.qk_norm:
            q, k = rms_norm(q, 1e-6), rms_norm(k, 1e-6)
        q, k = self.rotate(q), self.rotate(k)
        y = attend(q, k, v.to(q.dtype), self.scale, self.dropout if self.training else 0.0)
        if self.gate_w is not None:
            gate = torch.sigmoid(x[..., : self.gate_w.shape[1]] @ self.gate_w.T)  # (B, T, H)
            y = y * gate.transpose(1, 2).unsqueeze(-1)
        return self.out(y.transpose(1, 2).flatten(2))


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H T K"],
    v: Float[Tensor, "B H T K"],
    scale: float | None,
    dropout: float,
) -> Float[Tensor, "B H T K"]:
    """Causal softmax(scale q k^T) v; scale None is 1/sqrt(K). The same numbers on every path, up to rounding.

    PyTorch's fused kernel, except in bf16 on a CPU at short windows: plain batched products take, forward
    and backward on one core, 6 ms instead of 20 at T = 128, 14 instead of 22 at 256, 24 instead of 36 at 512;
    from 1024 on they lose.
    """
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-2] <= PLAIN_UP_TO
    if not short or dropout:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scale)
    later = torch.full((q.shape[-2], q.shape[-2]), -torch.inf, dtype=q.dtype).triu(1)
    scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.mT + later
    return scores.softmax(-1) @ v


def check(d_model: int, n_heads: int, position: str) -> None:
    """The sizes fit together, or a UserError says all that do not."""
    problems = []
    if d_model % n_heads:
        problems.append(f"model.n_heads={n_heads} does not divide model.d_model={d_model}")
    elif position == "rope" and (d_model // n_heads) % 2:
        problems.append(
            "attention.position=rope needs an even d_head, got model.d_model / model.n_heads = "
            f"{d_model // n_heads}"
        )
    if position not in POSITIONS:
        problems.append(f"attention.position={position!r}: expected one of {', '.join(POSITIONS)}")
    if problems:
        raise UserError(*problems)
