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
from ffnlab.nn.ffn.base import FFN, GatedFFN
from ffnlab.nn.ffn.dual_path import TwoDowns
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.ffn.paired import Paired
from ffnlab.nn.ffn.paired_init import PairedInit
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


def as_product(x: Tensor) -> torch.dtype:
    """The precision in which a matrix product with x would run: autocast's, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(matrix: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in that precision."""
    assert isinstance(matrix, nn.Linear)
    return matrix.weight.to(dtype), None if matrix.bias is None else matrix.bias.to(dtype)


def active(ffn: FFN, x: Float[Tensor, "T D"], matrix: nn.Module) -> Active:
    """Where `matrix` gives pre-activations above C, and by how much."""
    _, threshold = activation(ffn)
    c = x.new_zeros(()) if threshold is None else threshold
    return Active(*kernels.compact(x, *linear(matrix, x.dtype), c, ffn.d_ff))


def mlp(ffn: FFN, x: Float[Tensor, "T D"]) -> Active:
    """act(up x), and of paired neurons act([up x, -up x])."""
    found = active(ffn, x, ffn.up)
    return found._replace(values=activation(ffn)[0](found.values))


def tied(ffn: FFN, x: Float[Tensor, "T D"]) -> Active:
    """act(up x - C) * up x: the second factor is not shifted."""
    found = active(ffn, x, ffn.up)
    act, c = activation(ffn)
    pre = found.values
    if c is not None:
        pre = pre + (c if c.ndim == 0 else c[found.idx]).to(pre.dtype)
    return found._replace(values=act(found.values) * pre)


def gated(ffn: FFN, x: Float[Tensor, "T D"]) -> Active:
    """act(gate x) * up x: `up` only where the gate is open."""
    assert isinstance(ffn, GatedFFN)
    found = active(ffn, x, ffn.gate)
    weight, bias = linear(ffn.up, x.dtype)
    up = kernels.sddmm(found.crow, found.idx, x, weight)
    if bias is not None:
        up = up + bias[found.idx]
    return found._replace(values=activation(ffn)[0](found.values) * up)


# The formula of a variant is that of its `hidden`; one that writes its own has no sparse form until it
# stands here.
HIDDEN: dict[Callable, Callable[[FFN, Tensor], Active]] = {
    MLP.hidden: mlp,
    PairedInit.hidden: mlp,
    Paired.hidden: mlp,
    TiedReGLU.hidden: tied,
    GatedFFN.hidden: gated,
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


def way_down(ffn: FFN) -> tuple[Tensor, Tensor | None]:
    """The matrix (D, F) and the bias of the way down."""
    if isinstance(ffn.down, TwoDowns):
        return torch.cat([ffn.down.plus.weight, ffn.down.minus.weight], dim=1), ffn.down.plus.bias
    assert isinstance(ffn.down, nn.Linear)
    return ffn.down.weight, ffn.down.bias


def watched(ffn: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what the parts of the FFN see: then they must see all of it."""
    if ffn._forward_hooks or ffn._forward_pre_hooks or ffn._backward_hooks or ffn._backward_pre_hooks:
        return True
    return any(watched(part) for part in ffn._modules.values() if part is not None)


class SparseWay:
    """One FFN's sparse form. `on` says whether it is taken.

    Same parameters as the dense way, same results up to rounding. With dropout the same distribution, but
    other draws. The down matrix is needed by rows of neurons: turned once per call in training; kept as
    long as it does not change where no gradient is wanted.
    """

    def __init__(self, *, on: bool):
        self.on = on
        self.rows: tuple[tuple, Tensor, Tensor | None] | None = None

    def takes(self, ffn: FFN) -> bool:
        """Whether the next call goes this way."""
        return self.on and not watched(ffn)

    def __call__(self, ffn: FFN, x: Float[Tensor, "... D"]) -> tuple[Tensor, Tensor]:
        """y, and the hidden values that are not zero (nnz,)."""
        tokens = x.reshape(-1, ffn.d_model).to(as_product(x))
        found = HIDDEN[type(ffn).hidden](ffn, tokens)
        rows, bias = self.by_neuron(ffn, tokens.dtype)
        y = kernels.spmm(found.crow, found.idx, ffn.dropout(found.values), rows)
        y = y if bias is None else y + bias.to(y.dtype)
        return y.view(*x.shape[:-1], ffn.d_model), found.values

    def by_neuron(self, ffn: FFN, dtype: torch.dtype) -> tuple[Float[Tensor, "F D"], Tensor | None]:
        """The way down with one row per neuron, and its bias."""
        # What the matrix is made of, not itself: two matrices joined are a new tensor at every call.
        key = (dtype, *((p.data_ptr(), p._version) for p in ffn.down.parameters()))
        if torch.is_grad_enabled():
            self.rows = None  # an optimizer may change the weights and not count it as a version
        elif self.rows is not None and self.rows[0] == key:
            return self.rows[1], self.rows[2]
        matrix, bias = way_down(ffn)
        rows = matrix.to(dtype).t().contiguous()
        if not torch.is_grad_enabled():
            self.rows = key, rows, bias
        return rows, bias
