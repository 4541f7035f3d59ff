"""What the geometry takes from a run's configuration and metrics."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ffnlab.analysis.geometry.activations import Activation, activation, configured
from ffnlab.analysis.geometry.fractions import init_sd, threshold_for
from ffnlab.analysis.runs import LAYER, Run

GATED = ("Bilinear", "GEGLU", "GLU", "ReGLU", "ReGLU2", "SwiGLU")


class Neuron(NamedTuple):
    """A typical neuron of a run: its activation, C, the spread s of its pre-activations, D, where from."""

    name: str
    act: Activation
    c: float
    s: float
    d: int
    source: str
    of_run: bool  # activation and C are the run's own

    @property
    def radius(self) -> float:
        """The pre-activation of an aligned input, s sqrt(D)."""
        return self.s * math.sqrt(self.d)


def neuron(
    run: Run, act: str | None = None, c: float | None = None, layers: Sequence[str] | None = None
) -> Neuron:
    """The run's activation, C and s, both as recorded last, mean over layers; `act` and `c` replace its own.

    Raises UserError for an activation that has no curve.
    """
    of_run = act is None and c is None
    name, curve = configured(run.config["act"]) if act is None else (act, activation(act))
    s, c_seen = _last(run, "preact", "sd", layers), _last(run, "threshold", "c", layers)
    over = "as recorded last, mean over layers"
    if c is not None:
        of_c = "as asked for"
    elif c_seen is not None:
        c, of_c = c_seen, over
    else:
        c, of_c = start_c(run), "as configured"
    if s is None:
        s, of_s = start_sd(run), "before training"
    else:
        of_s = over
    d = run.config["model"]["d_model"]
    source = f"C = {c:.3g} {of_c}; pre-activations have the standard deviation s = {s:.3g} {of_s}."
    return Neuron(name, curve, c, s, d, source, of_run)


def start_sd(run: Run) -> float:
    """s before training; F as `expansion` says it, which matters to model.init=xavier alone."""
    model, ffn = run.config["model"], run.config["ffn"]
    d_ff = ffn.get("d_ff") or round(ffn.get("expansion", 4.0) * model["d_model"])
    return init_sd(model["init"], model["d_model"], d_ff)


def start_c(run: Run) -> float:
    """C as configured; 0 without a threshold."""
    threshold = run.config["threshold"]
    if threshold.get("active_frac") is not None:
        return threshold_for(threshold["active_frac"], start_sd(run))
    return float(threshold.get("init", 0.0))


def gated(run: Run) -> bool:
    """Whether the FFN multiplies act(gate x) by up x."""
    return _class(run, "ffn") in GATED


def off_sphere(run: Run) -> str:
    """What to say of a run whose inputs are not normalised to one length; '' for the others."""
    norm = _class(run, "norm_ffn")
    return f" With {norm} this run's own inputs lie on no sphere." if norm in ("NoNorm", "DyT") else ""


def _class(run: Run, group: str) -> str:
    return str(run.config.get(group, {}).get("_target_", "")).rpartition(".")[2]


def _last(run: Run, probe: str, metric: str, layers: Sequence[str] | None) -> float | None:
    """The last value of a metric of layers, mean over those chosen; None where it was never recorded."""
    keys = run.keys(rf"probe/{probe}/{LAYER.pattern}/{metric}")
    values = [run.series(key)[1][-1] for key in keys if layers is None or key.split("/")[2] in layers]
    return float(np.mean(values)) if values else None
