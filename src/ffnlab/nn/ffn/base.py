"""What every feed-forward variant has in common."""

from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffnlab.nn.count import TRAINING, flops, walk
from ffnlab.nn.penalty import Penalised


class FeedForward(Penalised):
    """What the rest of ffnlab sees of a variant: (..., D) -> (..., D), and what it costs.

    Most variants are an `FFN`; one that is made of several (experts, small FFNs) is made of `FFN`s, so that
    probes, counters and optimizers find `up`, `act` and `down` in it under the names that they know.
    """

    d_model: int
    d_ff: int

    def flops_per_token(self) -> int:
        """Forward floating-point operations of the matrix products that a token meets: 2 * in * out each."""
        return flops(self)

    def neuron_flops_per_token(self) -> int:
        """FLOPs of training that would fall away if no neuron were active: the sum over the FFNs that this
        one is made of, each as often as a token meets it.
        """
        return round(sum(part.neuron_flops_per_token() * share for part, share in self.made_of()))

    def skippable_flops_per_token(self) -> int:
        """`neuron_flops_per_token` of the FFNs whose activation has exact zeros."""
        found = (each for each in self.made_of() if getattr(each[0].act, "exact_zeros", False))
        return round(sum(part.neuron_flops_per_token() * share for part, share in found))

    def made_of(self) -> list[tuple["FFN", Fraction]]:
        """The FFNs that this one is made of (or itself), each with the share of the tokens that meets it."""
        return [(part, share) for _, part, share in walk(self) if isinstance(part, FFN)]

    def matched_parameters(self) -> int:
        """The parameters that `ffn.match=params` makes equal to the plain MLP's.

        Those of the activation (thresholds) are left out: the plain MLP has them as well.
        """
        own = (p for name, p in self.named_parameters() if "act" not in name.split("."))
        return sum(p.numel() for p in own)


class Kernel(Protocol):
    """Another way to compute an FFN: what `ffn.kernel` puts in (see `nn.sparse`)."""

    def takes(self, ffn: "FFN") -> bool:
        """Whether the next call goes this way."""
        ...

    def __call__(self, ffn: "FFN", x: Tensor) -> tuple[Tensor, Tensor]:
        """y (..., D), and the hidden values that are not zero."""
        ...


class FFN(FeedForward):
    """y = down(dropout(hidden(x))): a variant says what `hidden` is.

    The call is the seam where a sparse kernel steps in: a variant names none. `make_act(d_ff)` builds this
    layer's own activation (with its threshold), so that no state is shared between layers by accident.
    `bias` names the matrices that have one; names of matrices that a variant lacks are ignored, so that
    "all of them" can be said for every variant alike. d_ff counts the neurons: what `act` maps.
    """

    up: nn.Module
    down: nn.Module
    l1: Tensor | None  # coefficient of the sum of |hidden| over the neurons, see nn.l1
    kernel: Kernel | None = None  # None: the dense products

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
    ):
        super().__init__()
        self.d_model, self.d_ff = d_model, d_ff
        self.up = nn.Linear(d_model, d_ff, bias="up" in bias)
        self.act = make_act(d_ff)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(d_ff, d_model, bias="down" in bias)
        self.register_buffer("l1", None, persistent=False)

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        """What the neurons put out, before dropout and the way down."""
        raise NotImplementedError

    def neuron_flops_per_token(self) -> int:
        """The products of the matrices with a row or a column per neuron, three each (forward, and two
        backward), but for the one that gives the pre-activations.

        At an active fraction p, a kernel that touches active (token, neuron) pairs only skips (1 - p) of
        them.
        """
        ways_in = [getattr(self, "gate", None), self.up]
        own = [m for m in ways_in if isinstance(m, nn.Linear) and m.out_features == self.d_ff]
        dense = flops(own[0]) if own else 0
        if isinstance(self.down, nn.Linear):
            own.append(self.down)
        return TRAINING * sum(flops(matrix) for matrix in own) - dense

    def forward(
        self, x: Float[Tensor, "... D"], rows: Int[Tensor, " n"] | None = None, n_tokens: int | None = None
    ) -> Float[Tensor, "... D"]:
        """y of every token. An expert gets the tokens (n, D) that are its own, their `rows` among all
        `n_tokens`, and gives y of its own: so the probes see, in the arguments of the call, which tokens its
        neurons belong to.
        """
        if self.kernel is not None and self.kernel.takes(self):
            y, hidden = self.kernel(self, x)
        else:
            hidden = self.hidden(x)
            y = self.down(self.dropout(hidden))
        if self.l1 is not None and self.training:
            total = hidden.abs().sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
            self.penalty = self.l1 * total / (n_tokens or x.shape[:-1].numel())
        return y


class GatedFFN(FFN):
    """hidden = act(gate x) * up x: two input matrices, multiplied by neuron (Shazeer, arXiv 2002.05202).

    The activation sits on `gate`: its input is the pre-activation, the one that C is subtracted from.

    Two products, not one with the joined matrix: forward and backward on 4096 tokens, two cores, one product
    took 1.00 to 1.09 times as long at d_model 128, 512 and 768, in fp32 and bf16, and joining two matrices in
    every call 1.00 to 1.17 times.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        make_act: Callable[[int], nn.Module],
        bias: frozenset[str],
        dropout: float,
    ):
        super().__init__(d_model=d_model, d_ff=d_ff, make_act=make_act, bias=bias, dropout=dropout)
        self.gate = nn.Linear(d_model, d_ff, bias="gate" in bias)

    def hidden(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... F"]:
        return self.act(self.gate(x)) * self.up(x)
