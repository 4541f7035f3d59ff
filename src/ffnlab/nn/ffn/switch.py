"""The Switch layer: one expert per token, with a capacity."""

from collections.abc import Callable
from typing import Literal

from torch import nn

from ffnlab.nn.ffn.moe import MoE


class Switch(MoE):
    """y = p_e(x) FFN_e(x), e the expert with the largest p (Fedus et al., arXiv 2101.03961, eq. 2).

    `MoE` with k = 1 and gates that are not renormalised: divided by their sum they would all be 1, and the
    router would learn nothing from the loss.
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
        gated: bool,
        capacity_factor: float | None,
        balance: float,
        z_loss: float,
        matched: Literal["active", "total"],
    ):
        super().__init__(
            d_model=d_model,
            d_ff=d_ff,
            make_act=make_act,
            bias=bias,
            dropout=dropout,
            seq_len=seq_len,
            n_experts=n_experts,
            top_k=1,
            gated=gated,
            renormalise=False,
            capacity_factor=capacity_factor,
            balance=balance,
            z_loss=z_loss,
            matched=matched,
        )
