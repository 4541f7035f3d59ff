"""The products in plain PyTorch, on any device and in any precision: what the other backends are tested
against.

They hold a row of the dense operand for every entry, so they are for small sizes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def compact(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, d_ff: int
) -> tuple[Tensor, Tensor, Tensor]:
    pre = F.linear(x, weight, bias)
    if d_ff > weight.shape[0]:
        pre = torch.cat([pre, -pre], dim=-1)[:, :d_ff]
    pre = pre - threshold.to(pre.dtype)
    active = ~(pre <= 0)  # a NaN is active
    counts = active.sum(1)
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return crow, active.nonzero()[:, 1].to(torch.int32), pre[active]


def row_of(crow: Tensor, idx: Tensor) -> Tensor:
    """The row of every entry."""
    rows = torch.arange(crow.shape[0] - 1, device=crow.device)
    return torch.repeat_interleave(rows, crow.diff(), output_size=idx.shape[0])


def spmm(crow: Tensor, idx: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    sums = wide(dense).new_zeros(crow.shape[0] - 1, dense.shape[1])
    terms = wide(values).unsqueeze(1) * wide(dense)[idx]
    return sums.index_add(0, row_of(crow, idx), terms).to(dense.dtype)


def sddmm(crow: Tensor, idx: Tensor, a: Tensor, dense: Tensor) -> Tensor:
    return (wide(a)[row_of(crow, idx)] * wide(dense)[idx]).sum(1).to(dense.dtype)


def spmm_t(crow: Tensor, idx: Tensor, values: Tensor, a: Tensor, n: int) -> Tensor:
    terms = wide(values).unsqueeze(1) * wide(a)[row_of(crow, idx)]
    return wide(a).new_zeros(n, a.shape[1]).index_add(0, idx, terms).to(a.dtype)


def column_sums(crow: Tensor, idx: Tensor, values: Tensor, n: int) -> Tensor:
    return wide(values).new_zeros(n).index_add(0, idx, wide(values))


def wide(x: Tensor) -> Tensor:
    """In fp32 at least: that is what sums are kept in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
