"""What a difference in loss is worth in steps, seconds and FLOPs, read off curves that were measured."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from ffnlab.analysis.runs import Run

TRAINING = 3  # a step costs three forward passes: the backward pass counts twice


class Steps(NamedTuple):
    """A place on a curve; `beyond`: the curve ends at `step`, and is not there yet."""

    step: float
    beyond: bool


def equivalent_steps(steps: Int[np.ndarray, " n"], losses: Float[np.ndarray, " n"], target: float) -> Steps:
    """The step at which a loss curve is at `target`.

    The curve is made non-increasing (isotonic regression), and its inverse is drawn through its levels, each
    at its first step, by monotone cubics (PCHIP). It is never extrapolated: a target below the last level is
    beyond the last step. The curve has its own learning-rate schedule: a run that is planned for fewer steps
    is better at them than this one in passing.
    """
    levels = isotonic_regression(losses, increasing=False).x
    if target < levels[-1]:
        return Steps(float(steps[-1]), beyond=True)
    first = np.r_[True, np.diff(levels) < 0]
    falls, at = -levels[first], steps[first]
    if target >= levels[0]:
        return Steps(float(steps[0]), beyond=False)
    return Steps(float(PchipInterpolator(falls, at)(-target)), beyond=False)


def mean_curve(runs: list[Run], metric: str) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The mean of a metric over runs, at the steps at which all of them have it."""
    curves = [dict(zip(*run.series(metric), strict=True)) for run in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [np.mean([curve[step] for curve in curves]) for step in steps]
    return np.array(steps, dtype=np.int64), np.array(means, dtype=np.float64)


class Reached(NamedTuple):
    """What it took a run to come to a loss; infinite where it did not."""

    steps: float
    seconds: float
    flops: float


def reached(run: Run, metric: str, target: float) -> Reached:
    """When the run was first at or below `target`, on straight lines between its validations.

    FLOPs are those of training, 3 * FLOPs/token * tokens; seconds those since the start, validation and
    probes included.
    """
    rows = [row for row in run.rows if metric in row]
    flops_per_token = run.info.get("flops_per_token", np.nan)
    if not rows:
        return Reached(np.inf, np.inf, np.inf)

    def at(key: str) -> float:
        return first_at(
            np.array([row.get(key, np.nan) for row in rows], dtype=np.float64),
            np.array([row[metric] for row in rows], dtype=np.float64),
            target,
        )

    return Reached(at("step"), at("time_s"), TRAINING * flops_per_token * at("tokens"))


def first_at(x: Float[np.ndarray, " n"], losses: Float[np.ndarray, " n"], target: float) -> float:
    """The first x at which the straight lines through (x, loss) are at or below `target`; inf: nowhere."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return float("inf")
    i = below[0]
    if i == 0 or not np.isfinite(losses[i - 1]):
        return float(x[i])
    part = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float(x[i - 1] + part * (x[i] - x[i - 1]))
