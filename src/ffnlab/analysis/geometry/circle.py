"""What a neuron puts out while an input slides along the circle from its boundary to its direction."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ffnlab.analysis.geometry.activations import Activation

Angles = Float[np.ndarray, "*angles"]


class OnCircle(NamedTuple):
    """The output y at every angle t, and dy/dt per radian."""

    value: Float[np.ndarray, "*angles"]
    slope: Float[np.ndarray, "*angles"]


def on_circle(t: Angles, act: Activation, *, radius: float = 1.0, c: float = 0.0) -> OnCircle:
    """y = act(r sin t - C), dy/dt = act'(r sin t - C) r cos t.

    t = 0: the input is at right angles to the neuron's direction (A in the sources' pictures, at 90 degrees
    to it); t = pi/2: it is aligned with it (B, at 0 degrees). With r = 1 and C = 0 ReLU has slope 1 at A and
    0 at B (E2), ReLU^2 = sin^2 t has slope sin 2t, 0 at both and 1 at 45 degrees (E3). A network has
    r = |w| sqrt(D).
    """
    pre = radius * np.sin(t) - c
    return OnCircle(act.value(pre), act.slope(pre) * radius * np.cos(t))


def gated_on_circle(
    t: Angles, gate: Activation, *, between: float, radius: float = 1.0, c: float = 0.0
) -> OnCircle:
    """y = act(r sin t - C) r sin(t + between): a gated neuron in the plane of its gate and up directions.

    t is the angle above the gate's boundary, t + between that above the up direction's, so `between` is the
    angle between both; 0 ties them, and tied ReGLU is ReLU^2 (E43). At the gate's boundary (C = 0) the
    slope is act'(0) r^2 sin(between) + act(0) r cos(between). So a gate softens the boundary (E49) as far as
    the up pre-activation is small there too: to 0 when both are tied, not at all when they are at right
    angles.
    """
    opened, up = on_circle(t, gate, radius=radius, c=c), radius * np.sin(t + between)
    return OnCircle(opened.value * up, opened.slope * up + opened.value * radius * np.cos(t + between))


def boundary(c: float, radius: float) -> float:
    """The angle at which the pre-activation is C, arcsin(C / r); nan where C lies beyond the sphere."""
    return math.asin(c / radius) if abs(c) <= radius else math.nan
