"""The GPU backend: fp32, bf16 and fp16 with fp32 sums, in Triton. Its functions are those of `reference`.

The dense product is PyTorch's own. Nothing is tuned by the clock: the tiles are the constants below, for
another tile would sum in another order, and a resumed run must give the same numbers.

Floor: an entry reads a row of D numbers of b bytes from L1 or L2 for 2 D operations. Against a dense product
at R operations a second, with B bytes a second from the caches, a sparse product of density p pays below
p = 2 B / (b R): where tensor cores compute, at a few percent at most.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ffnlab.kernels import gpu_kernels as programs
from ffnlab.kernels.pattern import Last, row_starts
from ffnlab.kernels.reference import row_of

NEURONS = 1024  # of one token, compacted at a time by 4 warps
ENTRIES = 16  # of a row, in the tile of one warp
LINE_BYTES = 128  # of each dense row in a tile: a line of the cache, so narrow that many rows stay in L1
PIECE = 1024  # entries of a column that one program sums: a hot neuron must not keep the GPU waiting
PROGRAMS = 4096  # that keep a large GPU busy


def launch(program: Any, grid: tuple[int, ...], *args: Tensor | int, warps: int = 1, **sizes: int) -> None:
    """Start a program on the device of its operands, unless there is nothing to do. A product and its sum are
    rounded once, whatever this version of Triton does by itself.
    """
    like = args[0]
    assert isinstance(like, Tensor)
    if 0 not in grid:
        with torch.cuda.device_of(like):
            program[grid](*args, num_warps=warps, enable_fp_fusion=True, **sizes)


def tile(dense: Tensor) -> dict[str, int]:
    """ENTRIES x BLOCK: so many columns as fill a line."""
    columns = triton.next_power_of_2(max(1, dense.shape[1]))
    return {"ENTRIES": ENTRIES, "BLOCK": min(columns, LINE_BYTES // dense.element_size())}


def compact(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, d_ff: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Twice over the pre-activations: to count, then to write each row at its place."""
    pre = F.linear(x, weight, bias).contiguous()
    tokens, rows = pre.shape
    threshold = threshold.to(pre.dtype).contiguous()
    sizes = {"PER_NEURON": int(threshold.numel() > 1), "BLOCK": NEURONS}
    counts = torch.empty(tokens, dtype=torch.int64, device=pre.device)
    launch(programs.count_kernel, (tokens,), pre, threshold, counts, rows, d_ff, warps=4, **sizes)
    crow = row_starts(counts)
    total = int(crow[-1])  # waits for the GPU: only now is known how much room is needed
    idx, values = pre.new_empty(total, dtype=torch.int32), pre.new_empty(total)
    launch(programs.write_kernel, (tokens,), pre, threshold, crow, idx, values, rows, d_ff, warps=4, **sizes)
    return crow, idx, values


def spmm(crow: Tensor, idx: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    return product(crow, idx, values, dense, dense.dtype)


def product(crow: Tensor, idx: Tensor, values: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
    """`spmm` with a result of this precision. Programs that follow each other take the same columns, so that
    these of all dense rows stay in the caches meanwhile.
    """
    dense, values, rows = dense.contiguous(), values.contiguous(), crow.shape[0] - 1
    out, sizes = dense.new_empty(rows, dense.shape[1], dtype=dtype), tile(dense)
    grid = (rows, triton.cdiv(dense.shape[1], sizes["BLOCK"]))
    launch(programs.spmm_kernel, grid, crow, idx, values, dense, out, dense.shape[1], **sizes)
    return out


def fold(starts: Tensor, parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of consecutive rows of `parts`: row i from starts[i] up to starts[i + 1]."""
    rows, cols = starts.shape[0] - 1, parts.shape[1]
    out, sizes = parts.new_empty(rows, cols, dtype=dtype), tile(parts)
    sizes["ENTRIES"] = max(ENTRIES, 256 // sizes["BLOCK"])
    grid = (rows, triton.cdiv(cols, sizes["BLOCK"]))
    launch(programs.fold_kernel, grid, starts, parts, out, cols, **sizes)
    return out


def sddmm(crow: Tensor, idx: Tensor, a: Tensor, dense: Tensor) -> Tensor:
    a, dense, rows = a.contiguous(), dense.contiguous(), crow.shape[0] - 1
    out = dense.new_empty(idx.shape[0])
    shares = max(1, min(PROGRAMS // max(1, rows), triton.cdiv(dense.shape[0], ENTRIES)))
    grid = (rows, shares)  # a few tokens alone would leave most of the GPU idle
    launch(programs.sddmm_kernel, grid, crow, idx, a, dense, out, dense.shape[1], **tile(dense))
    return out


def spmm_t(crow: Tensor, idx: Tensor, values: Tensor, a: Tensor, n: int) -> Tensor:
    turned = transposed(crow, idx, n)
    parts = product(turned.pieces, turned.rows, values[turned.order], a, torch.float32)
    return fold(turned.first, parts, a.dtype)


def column_sums(crow: Tensor, idx: Tensor, values: Tensor, n: int) -> Tensor:
    turned = transposed(crow, idx, n)
    parts = fold(turned.pieces, values[turned.order].unsqueeze(1), torch.float32)
    return fold(turned.first, parts, torch.float32).squeeze(1)


class Turned(NamedTuple):
    """A pattern by columns, each cut into pieces of at most PIECE entries, which are summed on their own and
    then together: the entries' places in `idx` and their rows (nnz,), columns ascending, in a column rows
    ascending; where each piece starts (P + 1,); the first piece of each column (n + 1,).
    """

    order: Tensor
    rows: Tensor
    pieces: Tensor
    first: Tensor


LAST: Last[Turned] = Last()


def transposed(crow: Tensor, idx: Tensor, n: int) -> Turned:
    return LAST.of(crow, idx, n, transpose)


def transpose(crow: Tensor, idx: Tensor, n: int) -> Turned:
    """`transposed`, made anew, without waiting for the GPU: there is room for as many pieces as there can be,
    n + nnz / PIECE; those that are not needed are empty.
    """
    entries, device = idx.shape[0], idx.device
    kind = torch.int16 if n < 2**15 else torch.int32  # a radix sort goes over every byte of its keys
    columns, order = torch.sort(idx.to(kind), stable=True)
    starts = torch.searchsorted(columns, torch.arange(n + 1, dtype=kind, device=device))
    first = row_starts((starts.diff() + PIECE - 1) // PIECE)
    piece = torch.arange(n + entries // PIECE, device=device)
    column = torch.searchsorted(first, piece, right=True) - 1
    begin = starts[column] + (piece - first[column]) * PIECE
    pieces = torch.cat([begin.clamp(max=entries), starts[-1:]])
    return Turned(order, row_of(crow, idx).to(torch.int32)[order], pieces, first)
