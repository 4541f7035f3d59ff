"""How much of a layer's work could be left out: several measures of what stands before the way down.

The hidden value of a neuron is what `down` multiplies (the input of `down`): the post-activation, times `up`
in gated FFNs. It is 0 for the neurons of an expert on tokens that the expert does not get; the experts'
gates are left out.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, to_numpy
from ffnlab.probe.matrices import neuron_weights

SEARCH = 12  # halvings: the share of pairs is found to 1 / 4096


class Sparsity(Probe):
    """On the probe batch, `probe/sparsity/L03/`
    - `zero_frac`: share of the (token, neuron) pairs whose hidden value is exactly 0;
    - `energy_frac`: smallest share of the neurons that holds the share `energy` of sum_j h_j^2, by token,
      mean over the tokens with a sum above 0;
    - `two_four_frac`: share of the groups of 4 neighbouring neurons (0-3, 4-7, ...; a rest is left out) with
      at most 2 non-zeros, over all tokens: 1 where 2:4 sparse matrix products would be exact;
    - `cett_frac`, `cett_threshold`: cumulative errors of tail truncation (Zhang et al., arXiv 2402.03804).
      The contribution of neuron j to a token is |h_j| |d_j|, d_j its column of `down`. For a threshold e,
      CETT(e) = |sum of h_j d_j over contributions below e| / |sum of all h_j d_j| (without bias), mean over
      the tokens whose sum is not 0. `cett_threshold` is the largest e with CETT(e) <= `cett`, `cett_frac` the
      share of the pairs that stay and are not 0; searched among the quantiles of the contributions, to 1/4096
      of the pairs.
    A layer whose output is 0 (an untrained `down`) has no CETT.
    """

    def __init__(self, *, every: int, energy: float, cett: float):
        super().__init__(every=every)
        shares = {"energy": energy, "cett": cett}
        problems = [
            f"probe.sparsity.{name} is {value}; expected a number between 0 and 1."
            for name, value in shares.items()
            if not 0 < value < 1
        ]
        if problems:
            raise UserError(*problems)
        self.energy, self.cett = energy, cett
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        known = set(names)
        found = {label: [act.rpartition(".")[0] for act in acts] for label, acts in layers(names).items()}
        self.layers = {
            label: parents
            for label, parents in found.items()
            if all(f"{parent}.down" in known for parent in parents)
        }
        return [Site(f"{parent}.down", "input") for parents in self.layers.values() for parent in parents]

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for label, parents in self.layers.items():
            downs = [f"{parent}.down" for parent in parents]
            hidden = captured.neurons(downs, "input").float().nan_to_num(0.0)
            name = f"probe/sparsity/{label}"
            seen.scalars[f"{name}/zero_frac"] = hidden.eq(0).float().mean().item()
            groups = hidden[:, : hidden.shape[1] // 4 * 4].unflatten(1, (-1, 4))
            seen.scalars[f"{name}/two_four_frac"] = groups.ne(0).sum(2).le(2).float().mean().item()
            if (share := energy_frac(hidden, self.energy)) is not None:
                seen.scalars[f"{name}/energy_frac"] = share
            weights = torch.cat([neuron_weights(model.get_submodule(parent), "down") for parent in parents])
            if (found := truncate(hidden, weights.float(), self.cett)) is not None:
                seen.scalars[f"{name}/cett_frac"], seen.scalars[f"{name}/cett_threshold"] = found
        return seen


def energy_frac(hidden: Float[Tensor, "N F"], energy: float) -> float | None:
    """See `Sparsity`; None where no token has any energy."""
    squares = np.sort(np.square(to_numpy(hidden)), axis=1)[:, ::-1].cumsum(1, dtype=np.float64)
    squares = squares[squares[:, -1] > 0]
    if not len(squares):
        return None
    short = squares < energy * squares[:, -1:]
    return float((short.sum(1) + 1.0).mean()) / hidden.shape[1]


def truncate(
    hidden: Float[Tensor, "N F"], weights: Float[Tensor, "F D"], limit: float
) -> tuple[float, float] | None:
    """The share of pairs that stay and the threshold at which CETT is `limit`; None where the output is 0."""
    with torch.autocast(hidden.device.type, enabled=False):
        whole = (hidden @ weights).norm(dim=1)
        counted = whole > 0
        if not counted.any():
            return None
        sizes = hidden.abs() * weights.norm(dim=1)
        ordered = np.sort(to_numpy(sizes).ravel())

        def error(threshold: float) -> float:
            tail = torch.where(sizes < threshold, hidden, 0.0) @ weights
            return (tail.norm(dim=1)[counted] / whole[counted]).mean().item()

        low, high = 0.0, 1.0  # shares of the pairs: dropped without doubt, too many
        for _ in range(SEARCH):
            middle = (low + high) / 2
            within = error(float(ordered[int(middle * len(ordered))])) <= limit
            low, high = (middle, high) if within else (low, middle)
        threshold = float(ordered[int(low * len(ordered))])
        return ((sizes >= threshold) & (sizes > 0)).float().mean().item(), threshold
