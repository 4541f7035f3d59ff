"""The distribution of the pre-activations: the input of `act`, before a threshold C is subtracted."""

import math

import numpy as np
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Array, Captured, Observation, Probe, Site, layers, share, thresholds, to_numpy


class Preact(Probe):
    """Moments, a histogram and what lies close to the threshold, on the probe batch, in fp32.

    Over all (token, neuron) pairs of a layer, `probe/preact/L03/`
    - `mean`, `sd` (divides by the number of values), `kurtosis`: E[(x - mean)^4] / sd^4, 3 for a normal one;
    - `active_frac`: share with pre > C, which is 0 where there is no threshold;
    - `predicted_active_frac`: what that would be if pre - C were normal, 1 - Phi((C - mean) / sd);
    - `below_frac`, `above_frac`: shares with pre - C in [-eps, 0) and in (0, eps];
    - the array `L03/preact/hist (bin)`: how many lie in each of `bins` equal parts of [low, high]; the first
      and the last also count what lies beyond. `preact/edge (edge)` holds the bins + 1 edges; a value within
      rounding of an edge may fall on either side.
    By neuron, over the probed positions: the arrays `L03/preact/{mean,sd} (neuron)`.
    Neurons of an expert count the tokens that it gets; on none, their mean and sd are NaN.
    """

    def __init__(self, *, every: int, eps: float, low: float, high: float, bins: int):
        super().__init__(every=every)
        problems = [] if eps > 0 else [f"probe.preact.eps is {eps}; expected a number above 0."]
        problems += [] if bins > 0 else [f"probe.preact.bins is {bins}; expected at least 1."]
        problems += [] if low < high else [f"probe.preact.low is {low}; expected less than high, {high}."]
        if problems:
            raise UserError(*problems)
        self.eps, self.low, self.high, self.bins = eps, low, high, bins
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return [Site(act, "input") for acts in self.layers.values() for act in acts]

    def fixed(self) -> dict[str, Array]:
        edges = np.linspace(self.low, self.high, self.bins + 1, dtype=np.float32)
        return {"preact/edge": (edges, ("edge",))} if self.layers else {}

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, acts in self.layers.items():
            values = [captured.values[Site(act, "input")] for act in acts]
            # C as the forward pass subtracts it, in the precision of what it is subtracted from
            c = [to_numpy(c.to(values[0].dtype)) for c in thresholds(model, acts)]
            with np.errstate(all="ignore"):  # a run that diverges is not this probe's to stop
                self.look(seen, label, [met(value) for value in values], c)
        return seen

    def look(self, seen: Observation, label: str, parts: list[np.ndarray], c: list[np.ndarray]) -> None:
        """One layer: the pre-activations of its parts, (n, F) each, and their C, where they have one."""
        means, sds = zip(*map(by_neuron, parts), strict=True)
        pre = flat(parts)
        seen.arrays[f"{label}/preact/mean"] = (np.concatenate(means), ("neuron",))
        seen.arrays[f"{label}/preact/sd"] = (np.concatenate(sds), ("neuron",))
        seen.arrays[f"{label}/preact/hist"] = (self.histogram(pre), ("bin",))
        if pre.size:
            above = flat([part - own for part, own in zip(parts, c, strict=True)]) if c else pre
            spread = moments(pre)
            scalars = spread | self.around(above, moments(above) if c else spread)
            seen.scalars |= {f"probe/preact/{label}/{key}": value for key, value in scalars.items()}

    def histogram(self, pre: np.ndarray) -> np.ndarray:
        """Counts of (n,) in the bins; what is not a number is left out."""
        place = (pre - self.low) * (self.bins / (self.high - self.low))
        if np.isnan(place).any():
            place = place[~np.isnan(place)]
        place = place.clip(0, self.bins - 1).astype(np.int64)
        return np.bincount(place, minlength=self.bins).astype(np.int32)

    def around(self, above: np.ndarray, spread: dict[str, float]) -> dict[str, float]:
        """What lies above C and close to it, for pre - C of shape (n,) with these moments."""
        z = spread["mean"] / max(spread["sd"], 1e-30)
        return {
            "active_frac": (active := share(above > 0)),
            "predicted_active_frac": 0.5 * math.erfc(-z / math.sqrt(2)),
            "below_frac": share((above >= -self.eps) & (above < 0)),
            "above_frac": active - share(above > self.eps),
        }


def flat(parts: list[np.ndarray]) -> np.ndarray:
    """All values of all parts, (n,)."""
    return parts[0].ravel() if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])


def moments(values: np.ndarray) -> dict[str, float]:
    """Of (n,): mean, sd, kurtosis."""
    mean = values.mean()
    square = np.square(values - mean)
    var, fourth = float(square.mean()), float(square @ square) / values.size
    return {"mean": float(mean), "sd": math.sqrt(var), "kurtosis": fourth / max(var * var, 1e-30)}


def met(pre: Tensor) -> np.ndarray:
    """The rows of (N, F) that hold pre-activations: an expert has none on the tokens that it does not get."""
    values = to_numpy(pre)
    absent = np.isnan(values[:, 0])
    return values[~absent] if absent.any() else values


def by_neuron(pre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the columns of (n, F); NaN where n is 0."""
    if not len(pre):
        unknown = np.full(pre.shape[1], np.nan, np.float32)
        return unknown, unknown
    mean = pre.mean(0)
    return mean, np.sqrt(np.square(pre - mean).mean(0))
