"""The CPU backend: fp32 and bf16 tensors handed to the compiled library. Its functions are those of
`reference`.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ffnlab.kernels.build import library
from ffnlab.kernels.pattern import Last, row_starts

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
BLOCK_BYTES = 2**22  # of pre-activations at a time: still in the cache when they are compacted
SLACK = 16  # entries that a vector may write behind the last one


@functools.cache
def function(name: str) -> Any:
    """A function of the library."""
    found = library()[name]
    found.restype = ctypes.c_int64
    return found


def argument(a: Tensor | int | None) -> ctypes.c_int64 | ctypes.c_void_p:
    """Tensors go as pointers, None as the null pointer, numbers as int64."""
    return ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())


def call(name: str, *args: Tensor | int | None) -> int:
    """One function of the library; the number of threads goes last."""
    return function(name)(*map(argument, args), ctypes.c_int(torch.get_num_threads()))


def compact(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, d_ff: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The dense product and the threshold block by block: the pre-activations are never there as a whole."""
    n = weight.shape[0]
    threshold = threshold.to(x.dtype).contiguous()
    if x.shape[0] == 1:
        return compact_token(x, weight, bias, threshold, d_ff)
    size = block_rows(n * x.element_size())
    block = min(x.shape[0], size)
    pre, wide_val = x.new_empty(block, n), x.new_empty(block, d_ff + SLACK)
    wide_idx = wide_val.new_empty(wide_val.shape, dtype=torch.int32)
    parts = []
    for rows in x.contiguous().split(size):
        m = rows.shape[0]
        if bias is None:
            torch.mm(rows, weight.t(), out=pre[:m])
        else:
            torch.addmm(bias, rows, weight.t(), out=pre[:m])
        parts.append(compact_block(pre[:m], threshold, d_ff, wide_idx, wide_val))
    if len(parts) == 1:
        return parts[0]
    starts, idx, val = zip(*parts, strict=True)
    return row_starts(torch.cat([each.diff() for each in starts])), torch.cat(idx), torch.cat(val)


def compact_token(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, d_ff: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The active neurons of one token, without the ways of many: in sampling they take longer than this."""
    x, weight, (n, d_model) = x.contiguous(), weight.contiguous(), weight.shape
    bias = None if bias is None else bias.contiguous()
    idx = torch.empty(d_ff + SLACK, dtype=torch.int32)
    val, pre = x.new_empty(d_ff + SLACK), x.new_empty(n)
    step = int(threshold.numel() > 1)
    name = f"compact_token_{DTYPES[x.dtype]}"
    total = call(name, x, weight, bias, threshold, step, n, d_model, d_ff, pre, idx, val)
    return torch.tensor((0, total)), idx[:total], val[:total]


class Token:
    """An FFN's y (1, D) of one token x (1, D), in one call: with as little to compute, every way through
    Python counts. The operands are of one precision; a later change of them need not be seen.

    `way_in` (n, D) gives the pre-activations; the hidden values are max(0, pre - C)^power, with `up` times
    up x, when `tied` times pre; `rows` (F, D) is the way down.
    """

    def __init__(
        self,
        way_in: tuple[Tensor, Tensor | None],
        threshold: Tensor,
        up: tuple[Tensor, Tensor | None] | None,
        down: tuple[Tensor, Tensor | None],
        *,
        tied: bool,
        power: int,
    ):
        (rows, bias), (up_rows, up_bias) = down, up or (None, None)
        sizes = (int(threshold.numel() > 1), *way_in[0].shape, rows.shape[0])
        given = (*way_in, threshold, *sizes, up_rows, up_bias, int(tied), power, rows, bias)
        self.given = [
            a.contiguous() if isinstance(a, Tensor) else a for a in given
        ]  # alive, as their addresses
        self.function = functools.partial(function(f"token_{DTYPES[rows.dtype]}"), *map(argument, self.given))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self.function(argument(x), argument(y), ctypes.c_int(torch.get_num_threads()))
        return y


def block_rows(row_bytes: int) -> int:
    """Rows of a block: a power of two. The product of 4096 rows (768 -> 3072, bf16, two cores) took 25 ms in
    blocks of 512 rows, as whole, and 37 ms in blocks of 682.
    """
    return max(64, 1 << (BLOCK_BYTES // max(1, row_bytes)).bit_length() - 1)


def compact_block(
    pre: Tensor, threshold: Tensor, d_ff: int, wide_idx: Tensor, wide_val: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The active pairs of some rows: each row into a place of its own first, for how many there are is not
    known, then all together.
    """
    kind, (rows, n), room = DTYPES[pre.dtype], pre.shape, wide_val.shape[1]
    starts = torch.empty(rows + 1, dtype=torch.int64)
    step = int(threshold.numel() > 1)
    total = call(f"compact_{kind}", pre, threshold, step, rows, n, d_ff, room, wide_idx, wide_val, starts)
    idx, val = wide_idx.new_empty(total), wide_val.new_empty(total)
    call(f"pack_{kind}", wide_idx, wide_val, starts, rows, room, idx, val)
    return starts, idx, val


def agree(crow: Tensor, idx: Tensor, *operands: Tensor) -> None:
    """The kernels read what they are told is there: raise TypeError where it is of another type."""
    found = [crow.dtype, idx.dtype, *(operand.dtype for operand in operands)]
    if found[:2] != [torch.int64, torch.int32] or len(set(found[2:])) > 1:
        raise TypeError(f"expected crow int64, idx int32 and operands of one precision, got {found}")


def spmm(crow: Tensor, idx: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    agree(crow, idx, values, dense)
    dense = dense.contiguous()
    rows, (n, cols) = crow.shape[0] - 1, dense.shape
    y = dense.new_empty(rows, cols)
    call(f"spmm_{DTYPES[dense.dtype]}", crow, idx, values.contiguous(), dense, y, rows, n, cols)
    return y


def sddmm(crow: Tensor, idx: Tensor, a: Tensor, dense: Tensor) -> Tensor:
    agree(crow, idx, a, dense)
    a, dense = a.contiguous(), dense.contiguous()
    out = dense.new_empty(idx.shape[0])
    call(f"sddmm_{DTYPES[dense.dtype]}", crow, idx, a, dense, out, a.shape[0], *dense.shape)
    return out


def spmm_t(crow: Tensor, idx: Tensor, values: Tensor, a: Tensor, n: int) -> Tensor:
    agree(crow, idx, values, a)
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
