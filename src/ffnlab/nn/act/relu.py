"""Piecewise linear activations and their squares: ReLU, leaky ReLU, PReLU, ReLU6, ReLU^2 and its kin."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.nn.act.base import Activation


class ReLU(Activation):
    """max(0, x). Derivative 1 for x > 0, else 0: an inactive neuron gets no gradient (Nair & Hinton 2010)."""

    exact_zeros = rectifies = True
    power = 1

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.relu(pre)


class LeakyReLU(Activation):
    """x for x > 0, else `negative_slope` * x (Maas et al. 2013): no neuron can lose its gradient for good."""

    def __init__(self, *, d_ff: int, negative_slope: float):
        super().__init__(d_ff=d_ff)
        self.negative_slope = negative_slope

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.leaky_relu(pre, self.negative_slope)


class PReLU(Activation):
    """x for x > 0, else a x, with one learned a per layer (He et al., arXiv 1502.01852: the shared form).

    `slope` is where a starts; the paper starts at 0.25.
    """

    def __init__(self, *, d_ff: int, slope: float):
        super().__init__(d_ff=d_ff)
        self.slope = nn.Parameter(torch.tensor(float(slope)))

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return torch.where(pre > 0, pre, self.slope * pre)


class ReLU6(Activation):
    """min(max(0, x), 6): no gradient above 6 either (Krizhevsky 2010, Convolutional deep belief networks)."""

    exact_zeros = rectifies = True

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.relu6(pre)


class ReLU2(Activation):
    """max(0, x)^2, derivative 2 max(0, x) (So et al., Primer, arXiv 2109.08668)."""

    exact_zeros = rectifies = True
    power = 2

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return squared_relu(pre)


class LeakyReLU2(Activation):
    """LeakyReLU(x)^2: x^2 for x > 0, else `negative_slope`^2 x^2. The sign is not kept: a negative x gives a
    positive output, so that every neuron counts as active, and x = 0 is the lowest point.

    Slope 0.5, squared as it comes: parameter-golf PR 549 (after 493 and 518) and nanochat's dev/LOG.md.
    """

    def __init__(self, *, d_ff: int, negative_slope: float):
        super().__init__(d_ff=d_ff)
        self.negative_slope = negative_slope

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return nn.functional.leaky_relu(pre, self.negative_slope).square()


class StarReLU(Activation):
    """s max(0, x)^2 + b, with one learned s and one learned b per layer (MetaFormer, arXiv 2210.13452).

    s = 2/sqrt 5 and b = -1/sqrt 5 give mean 0 and variance 1 for x ~ N(0, 1). An inactive neuron puts out b,
    which is no zero.
    """

    def __init__(self, *, d_ff: int, scale: float, bias: float):
        super().__init__(d_ff=d_ff)
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        return self.scale * squared_relu(pre) + self.bias


class SmoothReLU2(Activation):
    """x/2 * (x + sqrt(x^2 + a^2)), a = `width`: ReLU^2 as a -> 0 (nanochat PR 828, a = 0.2).

    Rises everywhere; negative for x < 0, down to -a^2/4 far out, so no output is an exact zero.
    """

    def __init__(self, *, d_ff: int, width: float):
        super().__init__(d_ff=d_ff)
        if width <= 0:
            raise UserError(f"act.width={width}: expected a number above 0; act=relu2 is the limit at 0")
        self.width = width

    def forward(self, pre: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
        far = pre.abs() + (pre.square() + self.width**2).sqrt()
        # x + sqrt(x^2 + a^2) is a small difference of large numbers for x < 0; a^2 / far is the same number.
        return 0.5 * pre * torch.where(pre > 0, far, self.width**2 / far)


def squared_relu(x: Float[Tensor, "... F"]) -> Float[Tensor, "... F"]:
    """max(0, x)^2; without the bookkeeping of a gradient where none is wanted."""
    return SquaredReLU.apply(x) if torch.is_grad_enabled() else SquaredReLU.forward(x)


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2 that keeps its output alone, which whatever reads it (`down`, a gate) keeps anyway.

    The backward needs relu(x) = sqrt(output): in binary floating point the root of a rounded square is the
    number itself, but where the square underflows.
    Measured with the two products of an MLP on 4096 tokens, one core, against keeping relu(x) as well: 30
    instead of 54 MiB kept in fp32 at D = 384, 17 instead of 29 in bf16; time 1.05 and 0.9 to 1.1 times.
    `relu(x).square()` keeps as much as the latter and takes 1.1 to 1.2 times.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        r = x.relu()
        return r.mul_(r)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (square,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            root = root_of(square)
            return torch.addcmul(grad.new_zeros(()), grad, root, value=2, out=root)
        active = square > 0  # the root has no derivative at 0, where that of ReLU^2 is 0
        return 2 * grad * torch.where(active, square, 1).sqrt() * active


def root_of(square: Tensor) -> Tensor:
    """sqrt of numbers of which many are 0. In fp32 on a CPU the root of 0 takes MKL 17 times as long as that
    of another number: there the smallest normal number, 2^-126, takes its place, and its root is set to 0.
    """
    if square.device.type != "cpu" or square.dtype.itemsize == 2:
        return square.sqrt()
    tiny = torch.finfo(square.dtype).tiny
    return square.clamp_min(tiny).sqrt_().masked_fill_(square < tiny, 0)
