"""The CPU backend: fp32 and bf16 tensors handed to the compiled library. Its functions are those of
`reference`.
"""

import ctypes

import torch
from torch import Tensor

from ffnlab.kernels.build import library
from ffnlab.kernels.pattern import Last, row_starts

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
BLOCK_BYTES = 2**22  # of pre-activations at a time: still in the cache when they are compacted
SLACK = 16  # entries that a vector may write behind the last one


def call(name: str, *args: Tensor | int) -> None:
    """One function of the library: tensors go as pointers, numbers as int64, the number of threads last."""
    given = (ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int64(a) for a in args)
    library()[name](*given, ctypes.c_int(torch.get_num_threads()))


def compact(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, d_ff: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The dense product and the threshold block by block: the pre-activations are never there as a whole."""
    kind, n = DTYPES[x.dtype], weight.shape[0]
    threshold = threshold.to(x.dtype).contiguous()
    blocks = x.contiguous().split(max(64, BLOCK_BYTES // (max(1, n) * x.element_size())))
    rows, room = (blocks[0].shape[0] if blocks else 0), d_ff + SLACK
    pre = x.new_empty(rows, n)
    wide_idx, wide_val = pre.new_empty(rows, room, dtype=torch.int32), pre.new_empty(rows, room)
    counts, parts = torch.empty(x.shape[0], dtype=torch.int64), []
    done = 0
    for block in blocks:
        m = block.shape[0]
        if bias is None:
            torch.mm(block, weight.t(), out=pre[:m])
        else:
            torch.addmm(bias, block, weight.t(), out=pre[:m])
        own = counts[done : done + m]
        step = int(threshold.numel() > 1)
        call(f"compact_{kind}", pre, threshold, step, m, n, d_ff, room, wide_idx, wide_val, own)
        offsets = row_starts(own)
        total = int(offsets[-1])
        idx, val = wide_idx.new_empty(total), wide_val.new_empty(total)
        call(f"pack_{kind}", wide_idx, wide_val, offsets, m, room, idx, val)
        parts.append((idx, val))
        done += m
    empty = (wide_idx.new_empty(0), wide_val.new_empty(0))
    idx, val = (torch.cat(each) for each in zip(*(parts or [empty]), strict=True))
    return row_starts(counts), idx, val


def spmm(crow: Tensor, idx: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    dense = dense.contiguous()
    rows, (n, cols) = crow.shape[0] - 1, dense.shape
    y = dense.new_empty(rows, cols)
    call(f"spmm_{DTYPES[dense.dtype]}", crow, idx, values.contiguous(), dense, y, rows, n, cols)
    return y


def sddmm(crow: Tensor, idx: Tensor, a: Tensor, dense: Tensor) -> Tensor:
    a, dense = a.contiguous(), dense.contiguous()
    out = dense.new_empty(idx.shape[0])
    call(f"sddmm_{DTYPES[dense.dtype]}", crow, idx, a, dense, out, a.shape[0], *dense.shape)
    return out


def spmm_t(crow: Tensor, idx: Tensor, values: Tensor, a: Tensor, n: int) -> Tensor:
    ccol, row_of, order = transposed(crow, idx, n)
    by_column = torch.empty_like(values, memory_format=torch.contiguous_format)
    call(f"gather_{DTYPES[a.dtype]}", values.contiguous(), order, by_column, idx.shape[0])
    return spmm(ccol, row_of, by_column, a)


def column_sums(crow: Tensor, idx: Tensor, values: Tensor, n: int) -> Tensor:
    ccol, _, order = transposed(crow, idx, n)
    sums = torch.empty(n, dtype=torch.float32)
    call(f"column_sums_{DTYPES[values.dtype]}", ccol, order, values.contiguous(), sums, n)
    return sums


LAST: Last[tuple[Tensor, Tensor, Tensor]] = Last()


def transposed(crow: Tensor, idx: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pattern by columns: where each column starts (n + 1,), and for each of its entries the row and the
    place in `idx`, rows ascending.
    """
    return LAST.of(crow, idx, n, transpose)


def transpose(crow: Tensor, idx: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """`transposed`, made anew."""
    ccol = torch.empty(n + 1, dtype=torch.int64)
    row_of, order = torch.empty_like(idx), torch.empty_like(idx)
    call("transpose_pattern", crow, idx, crow.shape[0] - 1, n, ccol, row_of, order)
    return ccol, row_of, order
