"""The way through an FFN that computes active neurons only: what `ffn.kernel` puts into the seam of
`FFN.forward`.

Which neurons are active on a token is known from the dense product that gives the pre-activations; after
it, the products of `ffnlab.kernels` take the place of the dense ones, and the activation works on the
active values alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab import kernels
from ffnlab.kernels.cpu import Token
from ffnlab.nn.ffn.base import FFN, GatedFFN
from ffnlab.nn.ffn.dual_path import TwoDowns
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.ffn.paired import Paired
from ffnlab.nn.ffn.paired_init import PairedInit
from ffnlab.nn.ffn.ragged import product_dtype
from ffnlab.nn.ffn.tied_reglu import TiedReGLU
from ffnlab.nn.threshold import Thresholded


class Active(NamedTuple):
    """The active (token, neuron) pairs of T tokens, in CSR (see `ffnlab.kernels`), and a value for each."""

    crow: Tensor
    idx: Tensor
    values: Tensor

    def density(self, d_ff: int) -> float:
        """The share of all pairs that are active."""
        return self.idx.shape[0] / max(1, (self.crow.shape[0] - 1) * d_ff)


def activation(ffn: FFN) -> tuple[nn.Module, Tensor | None]:
    """The activation without its threshold, and the threshold C where there is one."""
    act = ffn.act
    return (act.act, act.threshold) if isinstance(act, Thresholded) else (act, None)


Operands = tuple[Tensor, Tensor | None]  # a matrix and its bias, if any, in the precision of a product


def linear(matrix: nn.Module, dtype: torch.dtype) -> Operands:
    """Weight and bias in that precision."""
    assert isinstance(matrix, nn.Linear)
    return matrix.weight.to(dtype), None if matrix.bias is None else matrix.bias.to(dtype)


def active(ffn: FFN, x: Float[Tensor, "T D"], way_in: Operands) -> Active:
    """Where `way_in` gives pre-activations above C, and by how much."""
    _, threshold = activation(ffn)
    c = x.new_zeros(()) if threshold is None else threshold
    return Active(*kernels.compact(x, *way_in, c, ffn.d_ff))


def mlp(ffn: FFN, x: Float[Tensor, "T D"], up: Operands) -> Active:
    """act(up x), and of paired neurons act([up x, -up x])."""
    found = active(ffn, x, up)
    return found._replace(values=activation(ffn)[0](found.values))


def tied(ffn: FFN, x: Float[Tensor, "T D"], up: Operands) -> Active:
    """act(up x - C) * up x: the second factor is not shifted."""
    found = active(ffn, x, up)
    act, c = activation(ffn)
    pre = found.values
    if c is not None:
        pre = pre + (c if c.ndim == 0 else kernels.spread(found.crow, found.idx, c)).to(pre.dtype)
    return found._replace(values=act(found.values) * pre)


def gated(ffn: FFN, x: Float[Tensor, "T D"], gate: Operands, up: Operands) -> Active:
    """act(gate x) * up x: `up` only where the gate is open."""
    found = active(ffn, x, gate)
    weight, bias = up
    values = kernels.sddmm(found.crow, found.idx, x, weight)
    if bias is not None:
        values = values + kernels.spread(found.crow, found.idx, bias)
    return found._replace(values=activation(ffn)[0](found.values) * values)


# The formula of a variant is that of its `hidden`, with the names of the matrices that it reads; one that
# writes its own has no sparse form until it stands here.
HIDDEN: dict[Callable, tuple[Callable[..., Active], tuple[str, ...]]] = {
    MLP.hidden: (mlp, ("up",)),
    PairedInit.hidden: (mlp, ("up",)),
    Paired.hidden: (mlp, ("up",)),
    TiedReGLU.hidden: (tied, ("up",)),
    GatedFFN.hidden: (gated, ("gate", "up")),
}


def obstacle(ffn: FFN) -> str | None:
    """Why this FFN has no sparse form, in words for the user; None where it has one."""
    act, _ = activation(ffn)
    if type(ffn).forward is not FFN.forward or type(ffn).hidden not in HIDDEN:
        return f"{type(ffn).__name__} has no sparse form"
    if not getattr(act, "rectifies", False):
        return f"{type(act).__name__} is not zero for every inactive neuron by itself, as the ReLU family is"
    if not isinstance(ffn.down, nn.Linear | TwoDowns):
        return f"its way down is {type(ffn.down).__name__}, not one matrix"
    return None


def by_neuron(down: nn.Module, dtype: torch.dtype) -> Operands:
    """The way down with one row per neuron (F, D), and its bias."""
    if isinstance(down, TwoDowns):
        (plus, bias), (minus, _) = linear(down.plus, dtype), linear(down.minus, dtype)
        return torch.cat([plus, minus], dim=1).t().contiguous(), bias
    weight, bias = linear(down, dtype)
    return weight.t().contiguous(), bias


def watched(ffn: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what the parts of the FFN see: then they must see all of it."""
    if ffn._forward_hooks or ffn._forward_pre_hooks or ffn._backward_hooks or ffn._backward_pre_hooks:
        return True
    return any(watched(part) for part in ffn._modules.values() if part is not None)


class Matrices(NamedTuple):
    """What the products read: the ways in, and the way down with one row per neuron."""

    ways_in: tuple[Operands, ...]
    down: Operands


def matrices(ffn: FFN, dtype: torch.dtype) -> Matrices:
    """Those of an FFN in that precision."""
    _, names = HIDDEN[type(ffn).hidden]
    return Matrices(tuple(linear(getattr(ffn, name), dtype) for name in names), by_neuron(ffn.down, dtype))


def one_token(ffn: FFN, made: Matrices) -> Callable[[Tensor], Tensor] | None:
    """The FFN for one token (1, D) at a time; None where no backend has it in one call."""
    rows, _ = made.down
    act, threshold = activation(ffn)
    power = vars(type(act)).get("power")  # not an inherited one: a subclass may have a formula of its own
    if rows.device.type != "cpu" or power is None or kernels.unavailable(rows.device, rows.dtype):
        return None
    c = rows.new_zeros(()) if threshold is None else threshold.detach().to(rows.dtype).contiguous()
    gate, up = made.ways_in[0], made.ways_in[1] if len(made.ways_in) == 2 else None
    return Token(gate, c, up, made.down, tied=HIDDEN[type(ffn).hidden][0] is tied, power=power)


class SparseWay:
    """One FFN's sparse form. `on` says whether it is taken.

    Same parameters as the dense way, same results up to rounding; but what is not a number in a weight or in
    an incoming gradient reaches active neurons only, where the dense way spreads it by 0 * NaN. With dropout
    the same distribution, but other draws. The matrices in the precision of the products, and the way down
    turned, are made once per call in training; kept as long as the parameters do not change where no gradient
    is wanted.
    """

    def __init__(self, *, on: bool):
        self.on = on
        self.kept: tuple[object, Matrices, Callable[[Tensor], Tensor] | None] | None = None

    def takes(self, ffn: FFN) -> bool:
        """Whether the next call goes this way."""
        if torch.is_grad_enabled():
            self.kept = None  # an optimizer may change the weights and not count it as a version
        return self.on and not watched(ffn)

    def __call__(self, ffn: FFN, x: Float[Tensor, "... D"]) -> tuple[Tensor, Tensor]:
        """y, and the hidden values that are not zero (nnz,); none are given where nobody is to use them."""
        tokens = x.reshape(-1, ffn.d_model).to(product_dtype(x))
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            made, token = matrices(ffn, tokens.dtype), None
        else:
            made, token = self.keep(ffn, tokens.dtype)
        if token is not None and len(tokens) == 1 and not ffn.training:
            return token(tokens).view(x.shape), tokens.new_empty(0)
        found = HIDDEN[type(ffn).hidden][0](ffn, tokens, *made.ways_in)
        rows, bias = made.down
        hidden = ffn.dropout(found.values).to(rows.dtype)  # an activation may leave the precision of autocast
        y = kernels.spmm(found.crow, found.idx, hidden, rows)
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], ffn.d_model), found.values

    def keep(self, ffn: FFN, dtype: torch.dtype) -> tuple[Matrices, Callable[[Tensor], Tensor] | None]:
        """What was made of the parameters, made again when they are others."""
        key = (dtype, versions(ffn))
        if self.kept is None or self.kept[0] != key:
            made = matrices(ffn, dtype)
            self.kept = key, made, one_token(ffn, made)
        return self.kept[1:]


def versions(module: nn.Module) -> object:
    """What is another one as soon as a parameter or a buffer of the module may have changed."""
    found, parts = [], [module]
    while parts:
        part = parts.pop()
        parts += filter(None, part._modules.values())
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                if tensor.is_inference():  # such tensors do not count their versions
                    return object()
                found += (tensor.data_ptr(), tensor._version)
    return tuple(found)
