"""What each token is given: which experts, how much of the width."""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, layers

EXPERT = re.compile(r"blocks\.\d+\.ffn\w*\.experts\.\d+\.act")
WIDTH = re.compile(r"blocks\.(\d+)\.ffn(\w*)\.width")


class Routing(Probe):
    """Load of the experts and mean width, on the probe batch; FFNs without either report nothing.

    `moe/L03/load_entropy`: -sum_e q_e ln q_e / ln E with q_e the share of expert e in the choices that were
    taken; 1 = balanced, 0 = one expert. `moe/L03/dropped_frac`: share of the choices that exceeded a
    capacity, of all positions of the probed windows (it is the late ones that are dropped). The array
    `L03/routing/load (expert)` holds q. `ffn/L03/width_frac`: mean share of the neurons that a token keeps,
    in whole neurons; that share of the FFN's FLOPs is needed.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.experts: dict[str, list[str]] = {}
        self.widths: dict[str, str] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.experts = layers(name for name in names if EXPERT.fullmatch(name))
        self.widths = widths(names)
        return [Site(act, "input") for acts in self.experts.values() for act in acts] + [
            Site(name, "output") for name in self.widths.values()
        ]

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, acts in self.experts.items():
            taken = torch.stack([met(captured.values[Site(act, "input")]) for act in acts]).float()
            ffn: Any = model.get_submodule(acts[0].rpartition(".experts.")[0])
            load = taken / taken.sum().clamp(min=1)
            entropy = torch.special.entr(load).sum().item() / max(math.log(len(acts)), 1e-9)
            seen.scalars[f"moe/{label}/load_entropy"] = entropy
            seen.scalars[f"moe/{label}/dropped_frac"] = float(ffn.dropped_frac)
            seen.arrays[f"{label}/routing/load"] = (load.cpu().numpy(), ("expert",))
        for label, name in self.widths.items():
            seen.scalars[f"ffn/{label}/width_frac"] = captured.values[Site(name, "output")].mean().item()
        return seen


def met(pre: Tensor) -> Tensor:
    """On how many tokens an expert was called: where it was not, its neurons have no pre-activation."""
    return pre[:, 0].isnan().logical_not().sum()


def widths(names: Iterable[str]) -> dict[str, str]:
    """The modules that choose a width, by the label of their layer."""
    found = ((WIDTH.fullmatch(name), name) for name in names)
    return {f"L{int(match[1]):02d}{match[2]}": name for match, name in found if match}
