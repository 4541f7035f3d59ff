"""Who crosses the threshold: the pairs of a probed token and a neuron, followed from look to look.

A pair is on when the pre-activation exceeds C, which is 0 where there is no threshold; on tokens that an
expert does not get, its neurons are off.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, thresholds


@dataclass
class Pairs:
    """What is remembered of the pairs of one layer."""

    on: np.ndarray  # (N, F) bool: at the last look
    ever: np.ndarray  # (N, F) bool: at any look
    flips: np.ndarray  # (N, F) int32: how often on and off have changed


class Crossings(Probe):
    """Over the N probed tokens, since the first look; what happens between two looks is not seen.

    By neuron, the arrays `L03/crossings/ (neuron)`:
    - `ever_active_frac`: share of its pairs that were on at this look or an earlier one (E41);
    - `flips_mean`: how often a pair has changed between on and off, mean over its pairs;
    - `on_off_rate`, `off_on_rate`: of its pairs that were on (off) at the last look, the share that are off
      (on) now (E48); NaN where there were none, and at the first look.
    The same over all pairs of a layer: `probe/crossings/L03/{ever_active_frac,flips_mean,on_off_rate,
    off_on_rate}`, and `recovery_rate`: of the pairs that had been on and were off at the last look, the share
    that are on now (E51). Rates are per interval between two looks, and left out where there is nothing to
    count. What is remembered goes into the checkpoints: 6 bytes a pair.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.layers: dict[str, list[str]] = {}
        self.pairs: dict[str, Pairs] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return [Site(act, "input") for acts in self.layers.values() for act in acts]

    def state(self) -> dict[str, Any]:
        return {
            label: {key: torch.from_numpy(values.copy()) for key, values in vars(pairs).items()}
            for label, pairs in self.pairs.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.pairs = {
            label: Pairs(**{key: tensor.numpy() for key, tensor in tensors.items()})
            for label, tensors in state.items()
        }

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, acts in self.layers.items():
            on = torch.cat([exceeds(captured, model, act) for act in acts], dim=1).cpu().numpy()
            for name, (part, whole) in self.look(label, on).items():
                if name != "recovery_rate":
                    by_neuron = np.where(whole > 0, part / np.maximum(whole, 1), np.nan).astype(np.float32)
                    seen.arrays[f"{label}/crossings/{name}"] = (by_neuron, ("neuron",))
                if pairs := int(whole.sum()):
                    seen.scalars[f"probe/crossings/{label}/{name}"] = int(part.sum()) / pairs
        return seen

    def look(self, label: str, on: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Remembers what is on, (N, F); by neuron, what is counted at this look, and over how many pairs."""
        none, before = np.zeros_like(on), self.pairs.get(label)
        if before is None:
            was_on, was_off, ever, flips = none, none, none, none.astype(np.int32)
        else:
            was_on, was_off, ever, flips = before.on, ~before.on, before.ever, before.flips
        fell, rose = was_on & ~on, was_off & on
        now = self.pairs[label] = Pairs(on, ever | on, flips + (fell | rose))
        everyone = np.full(on.shape[1], len(on))
        return {
            "ever_active_frac": (tally(now.ever), everyone),
            "flips_mean": (now.flips.sum(0), everyone),
            "on_off_rate": (tally(fell), tally(was_on)),
            "off_on_rate": (tally(rose), tally(was_off)),
            "recovery_rate": (tally(rose & ever), tally(was_off & ever)),
        }


def tally(pairs: np.ndarray) -> np.ndarray:
    """The number of a neuron's pairs of which something is true."""
    return np.count_nonzero(pairs, axis=0)


def exceeds(captured: Captured, model: nn.Module, act: str) -> Bool[Tensor, "N F"]:
    """Where the pre-activations of one module exceed its C, which is as precise as they are."""
    pre = captured.values[Site(act, "input")]
    c = [c.to(pre.dtype) for c in thresholds(model, [act])]
    return pre > (c[0] if c else 0)
