"""Exact geometry of a neuron whose inputs are normalised: what figures and statistics rest on.

An RMS-normed input x of D numbers lies on the sphere of radius sqrt(D). A neuron with input weights w sees
w x = |w| sqrt(D) sin t, where t is the angle of x above the plane of all inputs at right angles to w. For x
spread evenly over the sphere sin t is the dot product of two random unit vectors, and w x has mean 0 and
standard deviation s = |w|. Angles are in radians, thresholds C in the unit of the pre-activation.
"""

from ffnlab.analysis.geometry.activations import Activation, activation, configured
from ffnlab.analysis.geometry.circle import OnCircle, boundary, gated_on_circle, on_circle
from ffnlab.analysis.geometry.fractions import (
    Paired,
    active_frac,
    init_sd,
    mean_abs,
    paired,
    sampling_sd,
    selected_shift,
    threshold_for,
)
from ffnlab.analysis.geometry.sphere import (
    angle_density,
    dot_density,
    dot_quantile,
    dot_sd,
    mean_abs_dot,
    mean_largest_dot,
    share_above,
    share_beyond,
)

__all__ = [
    "Activation",
    "OnCircle",
    "Paired",
    "activation",
    "active_frac",
    "angle_density",
    "boundary",
    "configured",
    "dot_density",
    "dot_quantile",
    "dot_sd",
    "gated_on_circle",
    "init_sd",
    "mean_abs",
    "mean_abs_dot",
    "mean_largest_dot",
    "on_circle",
    "paired",
    "sampling_sd",
    "selected_shift",
    "share_above",
    "share_beyond",
    "threshold_for",
]
