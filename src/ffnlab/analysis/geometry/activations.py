"""Activations as curves: f and f' in float64, for those that act on each neuron alone.

The formulas and their sources stand in `ffnlab.nn.act`; the defaults are the values of `configs/act`. At a
kink f' is the slope on the right, so that ReLU has slope 1 at 0.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtr

from ffnlab.errors import UserError, unknown

Curve = Callable[[np.ndarray], np.ndarray]

COMPETING = ("quantile", "solu", "solu_norm", "top_k")  # an output depends on all neurons of the token


class Activation(NamedTuple):
    """A function of a pre-activation and its derivative."""

    value: Curve
    slope: Curve


def activation(which: str | Curve, **options: float) -> Activation:
    """An activation by its name in `configs/act`, or of a function, whose slope is then a central difference
    (step 1e-5: an error of about 1e-10 where the function is smooth, the mean of both sides at a kink).

    Raises UserError for an unknown name and for one of which no curve of a single neuron exists.
    """
    if callable(which):
        return Activation(which, lambda x: (which(x + 1e-5) - which(x - 1e-5)) / 2e-5)
    if which in COMPETING:
        raise UserError(
            f"act={which}: an output depends on all neurons of the token, so a neuron has no curve of its own"
        )
    if which not in FORMULAS:
        raise UserError(unknown("activation", which, FORMULAS))
    return FORMULAS[which](**options)


def configured(act: Mapping[str, Any]) -> tuple[str, Activation]:
    """The name and the curve of the activation in a run's configuration; learned numbers as they start.

    Raises UserError for one that is not ffnlab's own, or has no curve.
    """
    target = str(act["_target_"])
    own = {name.replace("_", ""): name for name in (*FORMULAS, *COMPETING)}
    name = own.get(target.rpartition(".")[2].lower()) if target.startswith("ffnlab.nn.act.") else None
    if name is None:
        raise UserError(f"act is {target}, of which no formula is known here")
    return name, activation(name, **{key: value for key, value in act.items() if key != "_target_"})


def identity() -> Activation:
    return Activation(lambda x: x, np.ones_like)


def leaky_relu(negative_slope: float = 0.01) -> Activation:
    return Activation(
        lambda x: np.where(x >= 0, x, negative_slope * x), lambda x: np.where(x >= 0, 1.0, negative_slope)
    )


def relu6() -> Activation:
    return Activation(lambda x: np.clip(x, 0, 6), lambda x: np.where((x >= 0) & (x < 6), 1.0, 0.0))


def squared(act: Activation) -> Activation:
    return Activation(lambda x: act.value(x) ** 2, lambda x: 2 * act.value(x) * act.slope(x))


def scaled(act: Activation, scale: float, bias: float = 0.0) -> Activation:
    return Activation(lambda x: scale * act.value(x) + bias, lambda x: scale * act.slope(x))


def star_relu(scale: float = 0.8944271910, bias: float = -0.4472135955) -> Activation:
    return scaled(squared(leaky_relu(0)), scale, bias)


def smooth_relu2(width: float = 0.2) -> Activation:
    def root(x: np.ndarray) -> np.ndarray:
        return np.hypot(x, width)

    return Activation(lambda x: x * (x + root(x)) / 2, lambda x: (x + root(x)) ** 2 / (2 * root(x)))


def gelu() -> Activation:
    return Activation(lambda x: x * ndtr(x), lambda x: ndtr(x) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi))


def gelu_tanh() -> Activation:
    def share(x: np.ndarray) -> np.ndarray:
        return np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))

    def share_slope(x: np.ndarray) -> np.ndarray:
        return (1 - share(x) ** 2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)

    return Activation(lambda x: x / 2 * (1 + share(x)), lambda x: (1 + share(x) + x * share_slope(x)) / 2)


def sigmoid() -> Activation:
    return Activation(expit, lambda x: expit(x) * expit(-x))


def tanh() -> Activation:
    return Activation(np.tanh, lambda x: 1 - np.tanh(x) ** 2)


def swish(beta: float = 1.0) -> Activation:
    return Activation(
        lambda x: x * expit(beta * x), lambda x: expit(beta * x) * (1 + beta * x * expit(-beta * x))
    )


def softplus(beta: float = 1.0) -> Activation:
    return Activation(lambda x: np.logaddexp(0, beta * x) / beta, lambda x: expit(beta * x))


def mish() -> Activation:
    def share(x: np.ndarray) -> np.ndarray:
        return np.tanh(np.logaddexp(0, x))

    return Activation(lambda x: x * share(x), lambda x: share(x) + x * (1 - share(x) ** 2) * expit(x))


def elu(alpha: float = 1.0) -> Activation:
    def left(x: np.ndarray) -> np.ndarray:
        return np.minimum(x, 0)  # e^x of a large x would overflow on the side that is not taken

    return Activation(
        lambda x: np.where(x >= 0, x, alpha * np.expm1(left(x))),
        lambda x: np.where(x >= 0, 1.0, alpha * np.exp(left(x))),
    )


def xielu(positive: float = 0.8, negative: float = 0.8, beta: float = 0.5) -> Activation:
    def left(x: np.ndarray) -> np.ndarray:
        return np.expm1(np.minimum(x, 0))

    return Activation(
        lambda x: np.where(x >= 0, positive * x**2, negative * (left(x) - x)) + beta * x,
        lambda x: np.where(x >= 0, 2 * positive * x, negative * left(x)) + beta,
    )


FORMULAS: dict[str, Callable[..., Activation]] = {
    "elu": elu,
    "gelu": gelu,
    "gelu2": lambda: squared(gelu()),
    "gelu_tanh": gelu_tanh,
    "identity": identity,
    "leaky_relu": leaky_relu,
    "leaky_relu2": lambda negative_slope=0.5: squared(leaky_relu(negative_slope)),
    "mish": mish,
    "prelu": lambda slope=0.25: leaky_relu(slope),
    "relu": lambda: leaky_relu(0),
    "relu2": lambda: squared(leaky_relu(0)),
    "relu6": relu6,
    "selu": lambda: scaled(elu(1.6732632423543772), 1.0507009873554805),
    "sigmoid": sigmoid,
    "silu": swish,
    "smooth_relu2": smooth_relu2,
    "softplus": softplus,
    "softplus2": lambda beta=1.0: squared(softplus(beta)),
    "star_relu": star_relu,
    "swish": swish,
    "tanh": tanh,
    "xielu": xielu,
}
