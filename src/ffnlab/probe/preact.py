"""The distribution of the pre-activations: the input of `act`, before a threshold C is subtracted."""

from torch import nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, to_numpy


class Preact(Probe):
    """Mean and standard deviation on the probe batch, in fp32.

    `probe/preact/L03/{mean,sd}` over all (token, neuron) pairs of a layer; the arrays `L03/preact/{mean,sd}
    (neuron)` over the probed positions, neuron by neuron. sd divides by the number of values.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return [Site(act, "input") for acts in self.layers.values() for act in acts]

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, acts in self.layers.items():
            pre = captured.neurons(acts, "input").float()
            mean = pre.mean(0)
            sd = (pre - mean).square().mean(0).sqrt()
            # Every neuron has as many tokens: variance = mean of the variances + variance of the means.
            pooled = sd.square().mean() + mean.var(correction=0)
            seen.scalars[f"probe/preact/{label}/mean"] = mean.mean().item()
            seen.scalars[f"probe/preact/{label}/sd"] = pooled.sqrt().item()
            seen.arrays[f"{label}/preact/mean"] = (to_numpy(mean), ("neuron",))
            seen.arrays[f"{label}/preact/sd"] = (to_numpy(sd), ("neuron",))
        return seen
