"""The data of the report's neuron explorer: small enough for a page, exact enough to look at.

Fractions go as bytes (steps of 1/254, 0.4 %), pre-activations as bytes over the range of their neuron; each
array is base64 of the bytes in C order with its shape beside it.
"""

import base64
from typing import Any

import numpy as np

from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import seen

EVENTS = 64  # most looks shown of a record, evenly spread, the first and the last among them
TRACED = 64  # neurons of a layer whose traces are shown, evenly spread over the final active fraction
TOKENS = 24  # of the probe batch, evenly spread
BEFORE, AFTER = 6, 2  # tokens of context around a top token


def explorer(run: Run) -> dict[str, Any]:
    """{"layers": {"L03": {"active": ..., "trace": ..., "top": ...}}}; empty where nothing was recorded."""
    layers: dict[str, Any] = {}
    for label in run.layers("activity"):
        data = run.neurons(f"{label}/activity")
        at = spread(data.sizes["step"], EVENTS)
        active = data["active_frac"].isel(step=at).load().values
        layers[label] = {"active": packed(active, 0.0, 1.0) | {"steps": steps(data, at)}}
        if label in run.layers("trace"):
            layers[label]["trace"] = trace(run, label, active[-1])
        if label in run.layers("top_tokens"):
            layers[label]["top"] = top(run, label)
    return {"layers": layers}


def spread(size: int, most: int) -> np.ndarray:
    """At most `most` places of `size`, even, with both ends."""
    return (
        np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))
        if size
        else np.array([], int)
    )


def steps(data: Any, at: np.ndarray) -> list[int]:
    return [int(step) for step in data["step"].values[at]]


def packed(values: np.ndarray, low: float | np.ndarray, high: float | np.ndarray) -> dict[str, Any]:
    """Bytes 0..254 for low..high (one range, or one for each place of the last axis), 255 for what is not
    finite, with what is needed to undo it.
    """
    scaled = np.clip((values.astype(np.float64) - low) / np.maximum(np.subtract(high, low), 1e-12), 0, 1)
    coded = np.where(np.isfinite(values), np.nan_to_num(scaled) * 254 + 0.5, 255).astype(np.uint8)
    return {
        "low": np.asarray(low, dtype=float).tolist(),
        "high": np.asarray(high, dtype=float).tolist(),
        "shape": list(values.shape),
        "data": base64.b64encode(coded.tobytes()).decode(),
    }


def trace(run: Run, label: str, active: np.ndarray) -> dict[str, Any]:
    """Pre-activations of some neurons on some tokens of the probe batch over the steps."""
    data = run.neurons(f"{label}/trace")
    at = spread(data.sizes["step"], EVENTS)
    neurons = np.sort(np.argsort(np.nan_to_num(active), kind="stable")[spread(len(active), TRACED)])
    tokens = spread(data.sizes["token"], TOKENS)
    values = data["preact"].isel(step=at).load().values[:, tokens][:, :, neurons].astype(np.float32)
    known = np.isfinite(values)
    low, high = (
        values.min((0, 1), initial=np.inf, where=known),
        values.max((0, 1), initial=-np.inf, where=known),
    )
    some = known.any((0, 1))
    return packed(values, np.where(some, low, 0.0), np.where(some, high, 1.0)) | {
        "steps": steps(data, at),
        "neurons": neurons.tolist(),
        "tokens": probe_texts(run, tokens),
    }


def probe_texts(run: Run, tokens: np.ndarray) -> list[str]:
    """The texts of some tokens of the probe batch; their places where no text is known."""
    if "probe_batch" not in run.groups:
        return [f"token {place}" for place in tokens]
    ids = run.neurons("probe_batch")["token"].values[tokens]
    return [word(run, int(i)) for i in ids]


def word(run: Run, token: int) -> str:
    """The text of a token, with what cannot be seen written out; its number where no text is known."""
    return seen(run.texts.get(token, f"#{token}"))


def top(run: Run, label: str) -> dict[str, Any]:
    """The tokens that activate each neuron most at the last scan: value, and text in its context."""
    data = run.neurons(f"{label}/top_tokens").isel(step=-1).load()
    scan = run.neurons("scan")["token"].values if "scan" in run.groups else None
    contexts: dict[int, list[str]] = {}
    if scan is not None:
        width = scan.shape[1]
        for place in np.unique(data["position"].values):
            if place >= 0:
                line, column = divmod(int(place), width)
                first = max(0, column - BEFORE)
                words = [word(run, int(i)) for i in scan[line, first : column + 1 + AFTER]]
                here = column - first
                contexts[int(place)] = ["".join(words[:here]), words[here], "".join(words[here + 1 :])]
    return {
        "step": int(data["step"]),
        "position": data["position"].values.astype(int).tolist(),
        "value": np.round(data["value"].values.astype(float), 3).tolist(),
        "context": contexts,
    }
