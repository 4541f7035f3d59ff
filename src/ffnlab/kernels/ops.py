"""The products as PyTorch operators: one backend per device, derivatives, shapes for torch.compile.

Each derivative is again one of the products, so that they can be differentiated as often as one likes.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.library import custom_op, register_autograd, register_fake

from ffnlab.kernels import cpu, reference
from ffnlab.kernels.build import NoCompiler, library

GPU_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def backend(like: Tensor) -> Any:
    """The module whose functions compute for tensors such as this one."""
    if unavailable(like.device, like.dtype) is not None:
        return reference
    if like.device.type == "cpu":
        return cpu
    from ffnlab.kernels import gpu  # not before it is asked for: there may be no Triton

    return gpu


def compiled() -> str | None:
    """None where the compiled CPU backend is at hand, else why not."""
    try:
        library()
    except NoCompiler as error:
        return str(error)
    return None


@functools.cache
def without_triton() -> str | None:
    """None where Triton is at hand, else why there is no GPU backend."""
    if importlib.util.find_spec("triton") is None:
        return "the sparse kernel of the GPU needs Triton, which PyTorch brings on Linux: pip install triton"
    return None


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why there is no fast backend for this device and precision, in words for the user; None where there
    is one.
    """
    if device.type == "cpu" and dtype not in cpu.DTYPES:
        return f"the sparse kernel of the CPU computes in fp32 and bf16, not in {dtype}"
    if device.type == "cuda" and dtype not in GPU_DTYPES:
        return f"the sparse kernel of the GPU computes in fp32, bf16 and fp16, not in {dtype}"
    if device.type not in ("cpu", "cuda"):
        return f"there is no sparse kernel for {device.type}"
    return compiled() if device.type == "cpu" else without_triton()


def direct(operator: Any) -> Any:
    """The operator, or where nothing is differentiated or compiled its backend at once: with one token the
    way through the operator takes as long as the product.
    """
    name = operator._name.rpartition("::")[2]

    @functools.wraps(operator._init_fn)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_fake(args[0]):
            return operator(*args)
        return getattr(backend(args[0] if name == "compact" else args[2]), name)(*args)

    return run


@direct
@custom_op("ffnlab::compact", mutates_args=())
def compact(
    x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, d_ff: int
) -> tuple[Tensor, Tensor, Tensor]:
    return backend(x).compact(x, weight, bias, threshold, d_ff)


@direct
@custom_op("ffnlab::spmm", mutates_args=())
def spmm(crow: Tensor, idx: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    return backend(dense).spmm(crow, idx, values, dense)


@direct
@custom_op("ffnlab::sddmm", mutates_args=())
def sddmm(crow: Tensor, idx: Tensor, a: Tensor, dense: Tensor) -> Tensor:
    return backend(dense).sddmm(crow, idx, a, dense)


@direct
@custom_op("ffnlab::spmm_t", mutates_args=())
def spmm_t(crow: Tensor, idx: Tensor, values: Tensor, a: Tensor, n: int) -> Tensor:
    return backend(a).spmm_t(crow, idx, values, a, n)


@custom_op("ffnlab::spread", mutates_args=())
def spread(crow: Tensor, idx: Tensor, values: Tensor) -> Tensor:
    """Not by indexing: its derivative would add up in the precision of `values`, in the order of the day."""
    return values.index_select(0, idx)


@direct
@custom_op("ffnlab::column_sums", mutates_args=())
def column_sums(crow: Tensor, idx: Tensor, values: Tensor, n: int) -> Tensor:
    return backend(values).column_sums(crow, idx, values, n)


@register_fake("ffnlab::compact")
def _(x, weight, bias, threshold, d_ff):
    entries = torch.library.get_ctx().new_dynamic_size()
    crow = x.new_empty(x.shape[0] + 1, dtype=torch.int64)
    return crow, x.new_empty(entries, dtype=torch.int32), x.new_empty(entries)


@register_fake("ffnlab::spmm")
def _(crow, idx, values, dense):
    return dense.new_empty(crow.shape[0] - 1, dense.shape[1])


@register_fake("ffnlab::sddmm")
def _(crow, idx, a, dense):
    return dense.new_empty(idx.shape[0])


@register_fake("ffnlab::spmm_t")
def _(crow, idx, values, a, n):
    return a.new_empty(n, a.shape[1])


@register_fake("ffnlab::spread")
def _(crow, idx, values):
    return values.new_empty(idx.shape[0])


@register_fake("ffnlab::column_sums")
def _(crow, idx, values, n):
    return values.new_empty(n, dtype=torch.promote_types(values.dtype, torch.float32))


def rows_of(weight: Tensor, d_ff: int) -> Tensor:
    """The input vector of every neuron: of more neurons than rows, neuron n + j has the negative of row j."""
    return weight if d_ff == weight.shape[0] else torch.cat([weight, -weight])[:d_ff]


def folded(rows: Tensor, n: int) -> Tensor:
    """The transpose of `rows_of`: what neuron n + j adds is taken from row j."""
    own, opposite = rows[:n], rows[n:]
    if opposite.shape[0] == 0:
        return own
    return torch.cat([own[: len(opposite)] - opposite, own[len(opposite) :]])


def save_compact(ctx, inputs, output) -> None:
    x, weight, _, threshold, ctx.d_ff = inputs
    crow, idx, _ = output
    ctx.save_for_backward(x, weight, crow, idx)
    ctx.threshold = (threshold.shape, threshold.dtype)
    ctx.mark_non_differentiable(crow, idx)


def compact_backward(ctx, _crow, _idx, grad):
    x, weight, crow, idx = ctx.saved_tensors
    n, (shape, dtype) = weight.shape[0], ctx.threshold
    wants_x, wants_weight, wants_bias, wants_threshold, _ = ctx.needs_input_grad
    to_c = to_bias = None
    if wants_threshold and shape.numel() == 1:
        to_c = -grad.sum(dtype=dtype).reshape(shape)
    if wants_bias or (wants_threshold and to_c is None):
        sums = column_sums(crow, idx, grad, ctx.d_ff)
        to_c = -sums.to(dtype) if to_c is None else to_c
        to_bias = folded(sums, n).to(weight.dtype)
    return (
        spmm(crow, idx, grad, rows_of(weight, ctx.d_ff)) if wants_x else None,
        folded(spmm_t(crow, idx, grad, x, ctx.d_ff), n) if wants_weight else None,
        to_bias if wants_bias else None,
        to_c if wants_threshold else None,
        None,
    )


def save_spmm(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])


def spmm_backward(ctx, grad):
    crow, idx, values, dense = ctx.saved_tensors
    _, _, wants_values, wants_dense = ctx.needs_input_grad
    return (
        None,
        None,
        sddmm(crow, idx, grad, dense) if wants_values else None,
        spmm_t(crow, idx, values, grad, dense.shape[0]) if wants_dense else None,
    )


def sddmm_backward(ctx, grad):
    crow, idx, a, dense = ctx.saved_tensors
    _, _, wants_a, wants_dense = ctx.needs_input_grad
    return (
        None,
        None,
        spmm(crow, idx, grad, dense) if wants_a else None,
        spmm_t(crow, idx, grad, a, dense.shape[0]) if wants_dense else None,
    )


def spmm_t_backward(ctx, grad):
    crow, idx, values, a = ctx.saved_tensors
    _, _, wants_values, wants_a, _ = ctx.needs_input_grad
    return (
        None,
        None,
        sddmm(crow, idx, a, grad) if wants_values else None,
        spmm(crow, idx, values, grad) if wants_a else None,
        None,
    )


def save_column_sums(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.dtype = inputs[2].dtype


def column_sums_backward(ctx, grad):
    return None, None, spread(*ctx.saved_tensors, grad).to(ctx.dtype), None


def save_spread(ctx, inputs, output) -> None:
    crow, idx, values = inputs
    ctx.save_for_backward(crow, idx)
    ctx.n, ctx.dtype = values.shape[0], values.dtype


def spread_backward(ctx, grad):
    return None, None, column_sums(*ctx.saved_tensors, grad, ctx.n).to(ctx.dtype)


register_autograd("ffnlab::compact", compact_backward, setup_context=save_compact)
register_autograd("ffnlab::spmm", spmm_backward, setup_context=save_spmm)
register_autograd("ffnlab::sddmm", sddmm_backward, setup_context=save_spmm)
register_autograd("ffnlab::spmm_t", spmm_t_backward, setup_context=save_spmm)
register_autograd("ffnlab::column_sums", column_sums_backward, setup_context=save_column_sums)
register_autograd("ffnlab::spread", spread_backward, setup_context=save_spread)
