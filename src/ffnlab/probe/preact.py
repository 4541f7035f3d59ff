"""The distribution of the pre-activations: the input of `act`, before a threshold C is subtracted."""

from torch import nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, to_numpy


class Preact(Probe):
    """Mean and standard deviation on the probe batch, in fp32.

    `probe/preact/L03/{mean,sd}` over all (token, neuron) pairs of a layer; the arrays `L03/preact/{mean,sd}
    (neuron)` over the probed positions, neuron by neuron. sd divides by the number of values. Neurons of an
    expert count the tokens that it gets; on none, their mean and sd are NaN.
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
            n = pre.isnan().logical_not().sum(0)  # an expert's neurons see some of the tokens
            mean = pre.nanmean(0)
            sd = (pre - mean).square().nanmean(0).sqrt()
            # variance = mean of the variances + variance of the means, weighted by the tokens of each neuron
            share, met = n / n.sum(), n > 0
            pooled = (share * mean)[met].sum()
            spread = (share * (sd.square() + (mean - pooled).square()))[met].sum()
            seen.scalars[f"probe/preact/{label}/mean"] = pooled.item()
            seen.scalars[f"probe/preact/{label}/sd"] = spread.sqrt().item()
            seen.arrays[f"{label}/preact/mean"] = (to_numpy(mean), ("neuron",))
            seen.arrays[f"{label}/preact/sd"] = (to_numpy(sd), ("neuron",))
        return seen
