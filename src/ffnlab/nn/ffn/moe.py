"""A mixture of experts: many FFNs, of which each token meets a few."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ffnlab.errors import UserError
from ffnlab.nn.ffn.base import FeedForward, GatedFFN
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.ffn.ragged import product_dtype, ragged


class Router(nn.Linear):
    """x -> one logit per expert, in fp32 under every autocast: in bf16 near ties would be decided by rounding
    (Switch's "selective precision")."""

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))


class MoE(FeedForward):
    """y = sum of g_e FFN_e(x) over the k experts e with the largest p_e(x), p = softmax(router x).

    Gates: g = p over the chosen experts, divided by their sum if `renormalise` (Mixtral, arXiv 2401.04088).
    Experts: MLPs, or GLUs if `gated`, of width d_ff each, each with its own matrices, as Muon needs them.
    Capacity: with a `capacity_factor` an expert takes at most ceil(factor * T k / E) choices of a sequence, T
    being the context that the model is trained with, the earlier positions first: a token is treated alike
    in a long text and in a short one, and none is pushed out by a later one. Choices beyond the capacity are
    dropped and add nothing to y; `dropped_frac` is their share in the last call in eval mode. null: dropless.
    Losses, summed over layers: balance * E sum_e f_e P_e with f the shares of the choices, P the mean of p:
    1 when balanced (Switch, arXiv 2101.03961, eq. 4; Hugging Face's is k times that), and
    z_loss * mean (logsumexp of the logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).
    Parameters: E (2 D F) + D E, or 3 for 2; a token meets k of the E (`matched: active`) of all (`total`).
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
        seq_len: int,
        n_experts: int,
        top_k: int,
        gated: bool,
        renormalise: bool,
        capacity_factor: float | None,
        balance: float,
        z_loss: float,
        matched: Literal["active", "total"],
    ):
        super().__init__()
        if not 1 <= top_k <= n_experts:
            raise UserError(f"ffn.top_k={top_k}: expected a number from 1 to ffn.n_experts={n_experts}")
        if capacity_factor is not None and capacity_factor <= 0:
            raise UserError(f"ffn.capacity_factor={capacity_factor}: expected null or a number above 0")
        self.d_model, self.d_ff, self.top_k, self.n_experts = d_model, d_ff, top_k, n_experts
        self.renormalise, self.matched = renormalise, matched
        self.capacity: int | None = None
        if capacity_factor is not None:
            self.capacity = math.ceil(capacity_factor * seq_len * top_k / n_experts)
        self.dropped_frac: float | Tensor = 0.0
        self.balance, self.z_loss = balance, z_loss
        self.router = Router(d_model, n_experts, bias=False)
        kind = GatedFFN if gated else MLP
        self.experts = Experts(
            ragged(kind(d_model=d_model, d_ff=d_ff, make_act=make_act, bias=bias, dropout=dropout))
            for _ in range(n_experts)
        )
        self.experts.token_share = Fraction(top_k, n_experts)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        tokens = x.reshape(-1, self.d_model)
        logits = self.router(tokens)
        log_z = logits.logsumexp(-1, keepdim=True)
        probs = (logits - log_z).exp()
        gates, chosen = probs.topk(self.top_k, dim=-1)
        if self.training:
            z_loss = log_z.square().mean()
            self.penalty = self.balance * imbalance(probs, chosen) + self.z_loss * z_loss
        if self.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        if self.capacity is not None:
            taken = within_capacity(chosen, x.shape[-2], self.n_experts, self.capacity)
            chosen = torch.where(taken, chosen, self.n_experts)
            if not self.training:
                self.dropped_frac = 1 - taken.float().mean()
        return self.experts(tokens, chosen, gates).view_as(x)

    def matched_parameters(self) -> int:
        everything, router = super().matched_parameters(), self.router.weight.numel()
        if self.matched == "total":
            return everything
        return router + (everything - router) * self.top_k // self.n_experts


class Experts(nn.ModuleList):
    """The experts, each called once with the tokens that are its own: one gather, one scatter, no loop over
    tokens.
    """

    token_share: Fraction  # the share of the tokens that meet an expert, for nn.count

    @torch.compiler.disable  # how many tokens an expert gets is known only when it gets them
    def forward(
        self, tokens: Float[Tensor, "N D"], chosen: Int[Tensor, "N k"], gates: Float[Tensor, "N k"]
    ) -> Float[Tensor, "N D"]:
        """sum over k of gate * expert(token); a choice with the number E is nobody's."""
        counts = loads(chosen, len(self))
        # Choices by expert, those of one expert in the order of the tokens; nobody's come last.
        order = chosen.flatten().argsort(stable=True)[: sum(counts)]
        rows = order // chosen.shape[1]
        own = tokens.to(product_dtype(tokens)).index_select(0, rows)
        shares = zip(self, own.split(counts), rows.split(counts), strict=True)
        out = torch.cat([expert(x, its, len(tokens)) for expert, x, its in shares])
        out = out * gates.to(out.dtype).flatten().index_select(0, order).unsqueeze(-1)
        return out.new_zeros(tokens.shape).index_add_(0, rows, out)


def loads(chosen: Int[Tensor, "N k"], n_experts: int) -> list[int]:
    """How many choices fell on each expert; even shares where the tensors have no contents (on `meta`, and
    where memory is estimated).
    """
    if chosen.is_meta or is_fake(chosen):
        share, rest = divmod(chosen.numel(), n_experts)
        return [share + (e < rest) for e in range(n_experts)]
    return chosen.flatten().bincount(minlength=n_experts).tolist()[:n_experts]


def imbalance(probs: Float[Tensor, "N E"], chosen: Int[Tensor, "N k"]) -> Float[Tensor, ""]:
    """E sum_e f_e P_e; the gradient is that of P, for f is a count."""
    n_experts = probs.shape[1]
    share = F.one_hot(chosen, n_experts).to(probs.dtype).mean((0, 1))
    return n_experts * (share * probs.mean(0)).sum()


def within_capacity(
    chosen: Int[Tensor, "N k"], length: int, n_experts: int, capacity: int
) -> Bool[Tensor, "N k"]:
    """Whether each choice is among the first `capacity` of its expert in its sequence of `length` tokens."""
    by_sequence = chosen.view(-1, length * chosen.shape[1])
    place = F.one_hot(by_sequence, n_experts).cumsum(1).gather(2, by_sequence.unsqueeze(2))
    return (place <= capacity).view_as(chosen)
