"""The pre-activations themselves: every probed token at every neuron of a few layers."""

import torch
from torch import nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Captured, Observation, Probe, Site
from ffnlab.probe.base import layers as ffn_layers


class Trace(Probe):
    """The array `L03/trace/preact (token, neuron)`: the input of `act`, before C is subtracted, in float16
    (11 bits of precision; beyond 65504 it is inf); NaN where a token does not reach an expert.

    `layers` lists the layers by their numbers; null: the first and the last that have an FFN. A look takes
    2 bytes * tokens * neurons a layer: with 128 tokens, 3072 neurons, two layers and 600 steps 0.9 GiB.
    """

    def __init__(self, *, every: int, layers: list[int] | None):
        super().__init__(every=every)
        self.wanted = layers
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        found = ffn_layers(names)
        by_number: dict[int, list[str]] = {}
        for label in found:
            by_number.setdefault(int(label[1:3]), []).append(label)
        ends = [min(by_number), max(by_number)] if by_number else []
        wanted = ends if self.wanted is None else self.wanted
        if missing := set(wanted) - set(by_number):
            raise UserError(
                f"probe.trace.layers has {sorted(missing)}; expected layers with an FFN: {sorted(by_number)}."
            )
        self.layers = {label: found[label] for n in sorted(set(wanted)) for label in by_number[n]}
        return [Site(act, "input") for acts in self.layers.values() for act in acts]

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, acts in self.layers.items():
            pre = captured.neurons(acts, "input").to(torch.float16).cpu().numpy()
            seen.arrays[f"{label}/trace/preact"] = (pre, ("token", "neuron"))
        return seen
