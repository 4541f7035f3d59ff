"""Which tokens of the scan each neuron answers to most."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Observation, Probe, Scanner, Site, layers, to_numpy

MOST = float(np.finfo(np.float16).max)


class TopTokens(Probe):
    """The k positions of the scan at which each neuron's post-activation (the output of `act`) is largest.

    The arrays `L03/top_tokens/position (neuron, rank)`, int32, places in the scan when its windows are
    counted through, and `L03/top_tokens/value (neuron, rank)`, float16, what `act` puts out there: the
    largest first, of equal ones the earlier position first. A neuron that is active on fewer than k tokens
    has some of value 0 or below among them, a dead one no others; tokens that an expert does not get count as
    0. A value beyond +-65504 is recorded as that.

    Nothing is kept from one scan to the next. How the set changes is read off the record: the share of a
    scan's positions that are there again at the next.
    """

    def __init__(self, *, every: int, k: int):
        super().__init__(every=every)
        if k < 1:
            raise UserError(f"probe.top_tokens.k is {k}; expected at least 1.")
        self.k = k
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return []

    def scanner(self, model: nn.Module) -> tuple[list[Site], Scanner]:
        sites = [Site(act, "output") for acts in self.layers.values() for act in acts]
        return sites, _Largest(self.layers, self.k)


class _Largest(Scanner):
    """The largest so far, by neuron."""

    def __init__(self, layers: dict[str, list[str]], k: int):
        self.layers, self.k = layers, k
        self.found: dict[str, tuple[Tensor, Tensor]] = {}  # values and positions, (F, k) each

    def see(self, site: Site, rows: Float[Tensor, "N F"], start: int) -> None:
        value, position = largest(rows.T.contiguous(), self.k)
        position += start
        if site.module in self.found:
            old = self.found[site.module]
            value, position = torch.cat([old[0], value], dim=1), torch.cat([old[1], position], dim=1)
            value, order = largest(value, self.k)  # those of earlier chunks stand in front
            position = position.gather(1, order)
        self.found[site.module] = value, position

    def result(self) -> Observation:
        seen, dims = Observation(), ("neuron", "rank")
        for label, acts in self.layers.items():
            value, position = (torch.cat(part) for part in zip(*map(self.found.get, acts), strict=True))
            in_range = to_numpy(value.clamp(-MOST, MOST)).astype(np.float16)
            seen.arrays[f"{label}/top_tokens/value"] = (in_range, dims)
            seen.arrays[f"{label}/top_tokens/position"] = (position.int().cpu().numpy(), dims)
        return seen


def largest(values: Float[Tensor, "F N"], k: int) -> tuple[Float[Tensor, "F k"], Int[Tensor, "F k"]]:
    """The k largest of every row and where they stand, of equal ones the first: a stable sort, at a sixth of
    its price where few rows have an equal value beyond the k-th.
    """
    k = min(k, values.shape[1])
    top, place = values.topk(k, dim=1)  # which of several equal ones it takes is left open
    tied = (values >= top[:, -1:]).sum(1) > k
    if tied.any():
        place[tied] = values[tied].argsort(dim=1, descending=True, stable=True)[:, :k]
    place = place.sort(dim=1).values
    top, order = values.gather(1, place).sort(dim=1, descending=True, stable=True)
    return top, place.gather(1, order)
