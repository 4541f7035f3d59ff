"""Causal self-attention on PyTorch's scaled_dot_product_attention.

Axes: B batch, T position, D d_model, H heads, G key and value heads, K d_head = D/H.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.norm import rms_norm
from ffnlab.nn.position import POSITIONS, Rope

PLAIN_UP_TO = 512  # window up to which `attend` multiplies plainly in bf16 on a CPU
GATE_INPUTS = 12  # dimensions of the stream that a head's gate reads


class Causal(nn.Module):
    """softmax(mask(s q k^T)) v per head, then `out`; s = `scale` or 1/sqrt(K).

    - qk_norm: q, k <- q / rms(q), k / rms(k) per head, before the rotation, no gain.
    - Where the block has value embeddings e (B T G*K): v <- l1 v + l2 e, l1 = l2 = 0.5 at the start.
    - gate: head h times sigmoid(w_h . x[:12]), w = 0 at the start.
    - n_kv_heads: G heads of keys and values, each read by H/G heads of queries in a row (grouped queries,
      Ainslie et al., arXiv 2305.13245); None: G = H.
    - window: a position sees itself and the window - 1 before it (Beltagy et al., arXiv 2004.05150), but all
      before it in `long_layers` and where window is None.

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
        n_kv_heads: int | None,
        window: int | None,
        long_layers: list[int],
    ):
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        check(d_model, n_heads, n_kv_heads, position)
        self.layer, self.n_heads, self.n_kv_heads = layer, n_heads, n_kv_heads
        self.dropout, self.scale, self.qk_norm = dropout, scale, qk_norm
        far = window is None or window >= seq_len or layer in long_layers
        self.window = None if far else window
        d_kv = d_model // n_heads * n_kv_heads
        self.q = nn.Linear(d_model, d_model, bias="q" in bias)
        self.k = nn.Linear(d_model, d_kv, bias="k" in bias)
        self.v = nn.Linear(d_model, d_kv, bias="v" in bias)
        self.out = nn.Linear(d_model, d_model, bias="out" in bias)
        rope = {"d_head": d_model // n_heads, "seq_len": seq_len, "base": rope_base, "frac": rope_frac}
        self.rotate = Rope(**rope) if position == "rope" else nn.Identity()
        self.value_lambdas = nn.Parameter(torch.full((2,), 0.5)) if value_embedding else None
        self.gate_w = nn.Parameter(torch.zeros(n_heads, min(GATE_INPUTS, d_model))) if gate else None

    def forward(self, x: Float[Tensor, "B T D"], ctx: Any) -> Float[Tensor, "B T D"]:
        v = self.v(x)
        if self.value_lambdas is not None:
            v = self.value_lambdas[0] * v + self.value_lambdas[1] * ctx.values[self.layer]
        q, k = self.queries_keys(x, ctx.start)
        k, v = self.with_past(k, self.heads(v).to(q.dtype), ctx)
        mask = None if self.window is None or ctx.start else self.band(x, ctx)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, mask, self.scale, dropout, ctx.start > 0)
        if self.gate_w is not None:
            gate = torch.sigmoid(x[..., : self.gate_w.shape[1]] @ self.gate_w.T)  # (B, T, H)
            y = y * gate.transpose(1, 2).unsqueeze(-1)
        return self.out(y.transpose(1, 2).flatten(2))

    def band(self, x: Float[Tensor, "B T D"], ctx: Any) -> Bool[Tensor, "T T"]:
        """What each position sees of the window, made once per forward pass for all layers that have it: a
        model of a long `seq_len` holds no (seq_len, seq_len) mask.
        """
        assert self.window is not None
        if self.window not in ctx.bands:
            ctx.bands[self.window] = band(x.shape[1], self.window, x.device)
        return ctx.bands[self.window]

    def with_past(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T K"], ctx: Any
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"]]:
        """Keys and values of the tokens before these in front of theirs, as far back as they are seen."""
        before = ctx.exchange((self.layer, "keys"), k), ctx.exchange((self.layer, "values"), v)
        if not ctx.start:
            return k, v
        both = [torch.cat([old, new], dim=-2) for old, new in zip(before, (k, v), strict=True)]
        k, v = (each if self.window is None else each[..., -self.window :, :] for each in both)
        ctx.exchange((self.layer, "keys"), k)
        ctx.exchange((self.layer, "values"), v)
        return k, v

    def queries_keys(
        self, x: Float[Tensor, "B T D"], start: int = 0
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G T K"]]:
        """q and k as they meet in the product: normalised and rotated, before the scale."""
        q, k = self.heads(self.q(x)), self.heads(self.k(x))
        if self.qk_norm:
            q, k = rms_norm(q, 1e-6), rms_norm(k, 1e-6)
        if isinstance(self.rotate, Rope):
            q, k = self.rotate(q, start), self.rotate(k, start)
        return q, k

    def heads(self, y: Float[Tensor, "B T _"]) -> Float[Tensor, "B _ T K"]:
        """The heads side by side, each of d_head dimensions."""
        return y.unflatten(-1, (-1, self.q.out_features // self.n_heads)).transpose(1, 2)


def band(seq_len: int, window: int, device: torch.device) -> Bool[Tensor, "T T"]:
    """True where the position of the row sees that of the column: itself and the window - 1 before it."""
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S K"],
    mask: Bool[Tensor, "T T"] | None,
    scale: float | None,
    dropout: float,
    latest: bool = False,
) -> Float[Tensor, "B H T K"]:
    """softmax(scale q k^T) v over what `mask` lets a row see; mask None is causal, scale None is 1/sqrt(K).
    `latest`: q is of the last position alone, which sees all S.

    The same numbers on every path, up to rounding: PyTorch's fused kernel, except in bf16 on a CPU at short
    windows. There plain batched products take, forward and backward on one core, 6 ms instead of 20 at
    T = 128, 14 instead of 22 at 256, 24 instead of 36 at 512; from 1024 on they lose.
    """
    T, shared = q.shape[-2], q.shape[1] // k.shape[1]
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= PLAIN_UP_TO
    if not short or dropout or latest:
        causal, grouped = mask is None and not latest, shared > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    if shared > 1:
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    unseen = torch.full((T, T), -torch.inf, dtype=q.dtype)
    unseen = unseen.triu(1) if mask is None else unseen.masked_fill(mask, 0.0)
    scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.mT + unseen
    return scores.softmax(-1) @ v


def check(d_model: int, n_heads: int, n_kv_heads: int, position: str) -> None:
    """The sizes fit together, or a UserError says all that do not."""
    problems = []
    if d_model % n_heads:
        problems.append(f"model.n_heads={n_heads} does not divide model.d_model={d_model}")
    elif position == "rope" and (d_model // n_heads) % 2:
        problems.append(
            "attention.position=rope needs an even d_head, got model.d_model / model.n_heads = "
            f"{d_model // n_heads}"
        )
    if n_heads % n_kv_heads:
        problems.append(f"attention.n_kv_heads={n_kv_heads} does not divide model.n_heads={n_heads}")
    if position not in POSITIONS:
        problems.append(f"attention.position={position!r}: expected one of {', '.join(POSITIONS)}")
    if problems:
        raise UserError(*problems)
