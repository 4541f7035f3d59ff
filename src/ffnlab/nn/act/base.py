"""What every activation has in common."""

from typing import ClassVar

from torch import nn


class Activation(nn.Module):
    """Maps pre-activations (..., F) to post-activations (..., F), neuron by neuron.

    `exact_zeros` states whether an inactive neuron's output is exactly 0 (the ReLU family): only then is
    "active" a matter of fact, and only then can a sparse kernel skip the neuron without changing the result.
    `rectifies` states more: the output is 0 wherever the pre-activation is not above 0, and depends on that
    neuron's alone, so that it can be computed from the active pre-activations only.
    `power` is the p of those that are max(0, x)^p, which the kernel for one token computes by itself.
    `shift_invariant` states that adding one number to all neurons changes nothing, so that a threshold C that
    they share has no effect. `d_ff` is the width F; an activation with parameters of its own per neuron sizes
    them by it.
    """

    exact_zeros: ClassVar[bool] = False
    rectifies: ClassVar[bool] = False
    power: ClassVar[int | None] = None
    shift_invariant: ClassVar[bool] = False

    def __init__(self, *, d_ff: int):
        super().__init__()
        self.d_ff = d_ff
