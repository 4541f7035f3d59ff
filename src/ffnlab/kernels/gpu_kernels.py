"""The GPU backend's programs, in Triton: one program sums one row of a result, or a block of its columns.

A tile is ENTRIES entries x BLOCK columns. All its loads are under way at once, those of one entry are
neighbours in memory, and its products are added to a tile of fp32 sums, which is folded over the entries at
the end: the order depends on the tile alone, and no result is added to by two programs. Offsets are int64
where they can pass 2^31. The checks of shapes that the tests turn on must not wrap a program: no_type_check.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def above(pre, threshold, neuron, rows, d_ff, PER_NEURON: tl.constexpr):
    """pre - C of neurons of one token, in the precision of `pre`, and which are active; a NaN is."""
    inside = neuron < d_ff
    opposite = neuron >= rows  # of paired neurons: the negative of the row before
    value = tl.load(pre + tl.where(opposite, neuron - rows, neuron), mask=inside, other=0.0).to(tl.float32)
    c = tl.load(threshold + neuron * PER_NEURON, mask=inside, other=0.0).to(tl.float32)
    value = (tl.where(opposite, -value, value) - c).to(pre.dtype.element_ty)
    wide = value.to(tl.float32)
    return value, inside & ((wide > 0) | (wide != wide))


@triton.jit
@no_type_check
def count_kernel(pre, threshold, counts, rows, d_ff, PER_NEURON: tl.constexpr, BLOCK: tl.constexpr):
    """The active neurons of one token, counted."""
    token = tl.program_id(0).to(tl.int64)
    total = tl.full((BLOCK,), 0, tl.int32)
    for f in range(0, d_ff, BLOCK):
        _, active = above(pre + token * rows, threshold, f + tl.arange(0, BLOCK), rows, d_ff, PER_NEURON)
        total += active.to(tl.int32)
    tl.store(counts + token, tl.sum(total, 0).to(tl.int64))


@triton.jit
@no_type_check
def write_kernel(
    pre, threshold, crow, idx, values, rows, d_ff, PER_NEURON: tl.constexpr, BLOCK: tl.constexpr
):
    """The active neurons of one token, ascending, and their values, from its place in the pattern on."""
    token = tl.program_id(0).to(tl.int64)
    to = tl.load(crow + token)
    for f in range(0, d_ff, BLOCK):
        neuron = f + tl.arange(0, BLOCK)
        value, active = above(pre + token * rows, threshold, neuron, rows, d_ff, PER_NEURON)
        one = active.to(tl.int32)
        place = to + tl.cumsum(one, 0) - one
        tl.store(idx + place, neuron, mask=active)
        tl.store(values + place, value, mask=active)
        to += tl.sum(one, 0)


@triton.jit
@no_type_check
def spmm_kernel(crow, idx, values, dense, out, cols, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row: the dense rows that its entries name, times their values, summed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < cols
    last = tl.load(crow + row + 1)
    sums = tl.full((ENTRIES, BLOCK), 0.0, tl.float32)
    for k in range(tl.load(crow + row), last, ENTRIES):
        entry = k + tl.arange(0, ENTRIES)
        here = entry < last
        neuron = tl.load(idx + entry, mask=here, other=0).to(tl.int64)
        value = tl.load(values + entry, mask=here, other=0.0).to(tl.float32)
        there = dense + neuron[:, None] * cols + column[None, :]
        line = tl.load(there, mask=here[:, None] & inside[None, :], other=0.0)
        sums += value[:, None] * line.to(tl.float32)
    tl.store(out + row * cols + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def fold_kernel(starts, parts, out, cols, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row: the rows starts[row] .. starts[row + 1] - 1 of `parts`, summed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < cols
    last = tl.load(starts + row + 1)
    sums = tl.full((ENTRIES, BLOCK), 0.0, tl.float32)
    for k in range(tl.load(starts + row), last, ENTRIES):
        part = k + tl.arange(0, ENTRIES)
        there = parts + part[:, None] * cols + column[None, :]
        line = tl.load(there, mask=(part < last)[:, None] & inside[None, :], other=0.0)
        sums += line.to(tl.float32)
    tl.store(out + row * cols + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def sddmm_kernel(crow, idx, a, dense, out, cols, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """a's row times the dense rows that its entries name, ENTRIES at a time, shared among programs."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(crow + row + 1)
    begin = tl.load(crow + row) + tl.program_id(1) * ENTRIES
    for k in range(begin, last, tl.num_programs(1) * ENTRIES):
        entry = k + tl.arange(0, ENTRIES)
        here = entry < last
        neuron = tl.load(idx + entry, mask=here, other=0).to(tl.int64)
        sums = tl.full((ENTRIES, BLOCK), 0.0, tl.float32)
        for c in range(0, cols, BLOCK):
            column = c + tl.arange(0, BLOCK)
            inside = column < cols
            left = tl.load(a + row * cols + column, mask=inside, other=0.0).to(tl.float32)
            there = dense + neuron[:, None] * cols + column[None, :]
            line = tl.load(there, mask=here[:, None] & inside[None, :], other=0.0)
            sums += left[None, :] * line.to(tl.float32)
        tl.store(out + entry, tl.sum(sums, 1).to(out.dtype.element_ty), mask=here)
