"""The threshold C in front of an activation: post = act(pre - C), fixed or learned.

`NoThreshold`, `FixedThreshold` and `LearnedThreshold` are makers: made once per model, called once per layer
with that layer's activation and width. C is
- one number per layer (`scope="layer"`), per neuron (`"neuron"`) or for the whole model (`"model"`);
- `init` at the start, or, with `active_frac`, the value at which that fraction of the pre-activations lies
  above C before training (`calibrate`).
With a C shared by the layer this is an MLP whose hidden units share the bias -C.
"""

import math
from collections.abc import Callable
from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffnlab.errors import UserError

Scope = Literal["layer", "neuron", "model"]
MODEL_PASSES = 8


class Thresholded(nn.Module):
    """act(pre - C) on (..., F), with C as `.threshold`, of shape () or (F,), and the activation as `.act`.

    C is a Parameter (learned) or a buffer (fixed). `active_frac` and `scope` tell `calibrate` what to do;
    `exact_zeros` is the activation's.
    """

    threshold: Tensor
    scope: Scope

    def __init__(self, act: nn.Module, threshold: Tensor, *, active_frac: float | None, scope: Scope):
        super().__init__()
        self.act = act
        self.active_frac, self.scope = active_frac, scope
        self.exact_zeros = bool(getattr(act, "exact_zeros", False))
        if isinstance(threshold, nn.Parameter):
            self.threshold = threshold
        else:
            self.register_buffer("threshold", threshold)

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        # Adding -C is bit for bit the same as subtracting C, but its backward sums the gradient as it lies
        # instead of negating a copy of it first. The cast keeps a C per neuron from lifting bf16 to fp32.
        return self.act(pre + (-self.threshold).to(pre.dtype))

    @torch.no_grad()
    def place(self, pre: Float[Tensor, "..."]) -> None:
        """Set C to the value that the fraction `active_frac` of `pre` exceeds; for each neuron, if C is."""
        columns = pre.flatten(0, -2).T if self.scope == "neuron" else pre.reshape(1, -1)
        n = columns.shape[-1]
        if self.active_frac is None or n == 0:
            return
        rank = min(max(round((1 - self.active_frac) * n), 1), n)
        self.threshold.copy_(columns.contiguous().kthvalue(rank, dim=-1).values.view_as(self.threshold))


class NoThreshold:
    """post = act(pre): the activation as it is, C = 0 for good."""

    def __call__(self, act: nn.Module, d_ff: int) -> nn.Module:
        return act


class FixedThreshold:
    """post = act(pre - C) with a C that is not trained."""

    def __init__(self, *, init: float, active_frac: float | None, scope: Scope):
        check(init, active_frac)
        self.init, self.active_frac = init, active_frac
        self.scope: Scope = scope

    def __call__(self, act: nn.Module, d_ff: int) -> nn.Module:
        own = start(self.init, self.scope, d_ff)
        return Thresholded(act, own, active_frac=self.active_frac, scope=self.scope)


class LearnedThreshold:
    """post = act(pre - C) with C a parameter; dL/dC = -sum of dL/d(pre - C) over what shares it."""

    def __init__(self, *, init: float, active_frac: float | None, scope: Scope):
        check(init, active_frac)
        self.init, self.active_frac = init, active_frac
        self.scope: Scope = scope
        self.shared = nn.Parameter(start(init, scope, 1)) if scope == "model" else None

    def __call__(self, act: nn.Module, d_ff: int) -> nn.Module:
        own = self.shared if self.shared is not None else nn.Parameter(start(self.init, self.scope, d_ff))
        return Thresholded(act, own, active_frac=self.active_frac, scope=self.scope)


def check(init: float, active_frac: float | None) -> None:
    """Raise one UserError with all that is wrong with the numbers."""
    problems = []
    if not math.isfinite(init):
        problems.append(f"threshold.init is {init}; expected a finite number.")
    if active_frac is not None and not 0 < active_frac < 1:
        problems.append(f"threshold.active_frac is {active_frac}; expected null or a number between 0 and 1.")
    if active_frac is not None and init != 0:
        problems.append("threshold.init and threshold.active_frac both say where C starts; give one of them.")
    if problems:
        raise UserError(*problems)


def start(init: float, scope: Scope, d_ff: int) -> Tensor:
    """C at the start: () or, per neuron, (F,)."""
    return torch.full((d_ff,) if scope == "neuron" else (), float(init))


def calibrate(model: nn.Module, tokens: Int[Tensor, "B T"]) -> None:
    """Place every C that has an `active_frac` by what its layer sees on `tokens`.

    One forward pass for the scopes layer and neuron: each C is placed before its layer's first call, so that
    later layers see the earlier ones as placed. A C of the whole model moves what it is measured on, hence a
    few passes. Leaves random state and modes as they were. To be called before the model is compiled.
    """
    sites = [m for m in model.modules() if isinstance(m, Thresholded) and m.active_frac is not None]
    shared = [m for m in sites if m.scope == "model"]
    own = [m for m in sites if m.scope != "model"]
    if own:
        before_first_call(model, tokens, own, lambda site, pre: site.place(pre))
    for _ in range(MODEL_PASSES if shared else 0):
        seen: list[Tensor] = []
        before_first_call(model, tokens, shared, lambda _, pre, seen=seen: seen.append(pre.flatten()))
        for site in shared:
            site.place(torch.cat(seen))


@torch.no_grad()
def before_first_call(
    model: nn.Module, tokens: Tensor, sites: list[Thresholded], see: Callable[[Thresholded, Tensor], None]
) -> None:
    """One forward pass in eval mode that calls `see(site, pre)` before each site's first call."""
    hooks = {}

    def on_call(site: nn.Module, args: tuple[Tensor, ...]) -> None:
        hooks.pop(site).remove()
        see(cast(Thresholded, site), args[0])

    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        hooks.update((site, site.register_forward_pre_hook(on_call)) for site in sites)
        model(tokens)
    finally:
        for hook in hooks.values():
            hook.remove()
        for module in training:
            module.training = True
