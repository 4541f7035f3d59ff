"""The threshold C: what a neuron's pre-activation must exceed to be active."""

from torch import cat, nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, thresholds, to_numpy


class Threshold(Probe):
    """C of every layer that has one, fixed or learned: the attribute `threshold` of its activation module.

    `probe/threshold/L03/c`: C, or its mean over neurons where each neuron has its own; then also `c_sd`,
    `c_min`, `c_max` and the array `L03/threshold/c (neuron)`. Layers without a threshold report nothing.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return []

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, acts in self.layers.items():
            values = thresholds(model, acts)
            if not values:
                continue
            c = cat([value.float().flatten() for value in values])
            name = f"probe/threshold/{label}/c"
            seen.scalars[name] = c.mean().item()
            if any(value.dim() for value in values):
                seen.scalars[f"{name}_sd"] = c.std(correction=0).item()
                seen.scalars[f"{name}_min"], seen.scalars[f"{name}_max"] = c.min().item(), c.max().item()
                seen.arrays[f"{label}/threshold/c"] = (to_numpy(c), ("neuron",))
        return seen
