"""The sparse FFN: products that touch active (token, neuron) pairs only.

A pattern says which pairs are active, in CSR: `crow` (T + 1,) int64 and `idx` (nnz,) int32, so that the
entries crow[t] .. crow[t + 1] - 1 of `idx` are the active neurons of token t, ascending; `values` (nnz,) are
theirs.

    compact(x, W, b, C)          the active pairs of x W^T + b - C and their values (the one dense product)
    spmm(pattern, h, W)          y_t  = sum over active f of h_tf W_f     (way down; gradient of x)
    sddmm(pattern, a, W)         v_tf = a_t . W_f for active pairs        (gradient of h; `up` of gated units)
    spmm_t(pattern, h, a, F)     G_f  = sum over its tokens t of h_tf a_t (gradients of the matrices)
    column_sums(pattern, h, F)   s_f  = sum over its tokens t of h_tf     (gradients of b and C)
    spread(pattern, s)           s_f for active pairs                     (a bias of `up` in gated units)

W lies with one row per neuron: (F, D). In fp32 and bf16, on a GPU fp16 too, with fp32 sums, in an order
that depends on the sizes and entries of the whole product and not on the number of threads, so the result
does not depend on it either. Backends: `cpu` (C++, compiled on first use), `gpu` (Triton), `reference` (plain
PyTorch: every device and precision, small sizes).

Floor, D = d_model, F = d_ff, T tokens, density p: each product does 2 p T F D operations and reads as many
rows of D numbers as there are pairs, p T F D numbers: half an operation per byte in fp32, one in bf16, where
the dense product reaches tens. So they are bound by the caches and not by the arithmetic. Two cores of a Zen
5 read 646 GB/s from L1 and 396 from L2 and do 725 GFLOP/s in fp32: L2 alone would allow 198 GFLOP/s in fp32,
396 in bf16. At 768 x 3072 and 10 % spmm reached 147 (74 %) and 232 (58 %), sddmm 83 and 130, spmm_t, which
turns the pattern first, 113 and 157; in bf16 rows pass in pairs, with one dot product of two numbers each.
`ffnlab bench sparse` measures the caches and all products again.
"""

from ffnlab.kernels.ops import column_sums, compact, sddmm, spmm, spmm_t, spread, unavailable

__all__ = ["column_sums", "compact", "sddmm", "spmm", "spmm_t", "spread", "unavailable"]
