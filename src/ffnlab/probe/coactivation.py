"""Which neurons are active together."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Observation, Probe, Scanner, Site, layers


class Coactivation(Probe):
    """How the activity of neurons (post-activation > 0 or not) correlates over the tokens of the scan.

    Of `neurons` neurons of a layer, or all if it has fewer: the same at every scan, drawn from seed 0; of an
    FFN of several parts (experts) an equal share of each. A neuron that is active on no token or on all has
    no correlation and is left out; of the M others, phi (M, M) is Pearson's correlation of the indicators:
    - `probe/coactivation/L03/mean_abs_phi`: mean of |phi| over the pairs.
    - `probe/coactivation/L03/participation_ratio`: (sum of l)^2 / sum of l^2 = M^2 / sum of phi^2 over the
      eigenvalues l of phi: M when the neurons fire independently, 1 when they are one neuron.
    - the array `L03/coactivation/eigenvalue (rank)`: the largest `eigenvalues` of them; they sum to M.
    - the arrays `L03/coactivation/pair (pair_rank, side)`, int32, and `phi (pair_rank)`: the two neurons of
      the `pairs` largest phi, the largest first.
    With n tokens, |phi| of neurons that fire independently is about sqrt(2/(pi n)). An expert's neurons are
    inactive on the tokens that it does not get, so that the routing is part of phi. Where M leaves fewer
    values the arrays end in NaN and pairs (-1, -1); with M < 2 there are no scalars.
    """

    def __init__(self, *, every: int, neurons: int, eigenvalues: int, pairs: int):
        super().__init__(every=every)
        sizes = {"neurons": neurons, "eigenvalues": eigenvalues, "pairs": pairs}
        problems = [
            f"probe.coactivation.{name} is {size}; expected at least {least}."
            for (name, size), least in zip(sizes.items(), (2, 1, 1), strict=True)
            if size < least
        ]
        if problems:
            raise UserError(*problems)
        self.neurons, self.eigenvalues, self.pairs = neurons, eigenvalues, pairs
        self.layers: dict[str, list[str]] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return []

    def scanner(self, model: nn.Module) -> tuple[list[Site], Scanner]:
        sites = [Site(act, "output") for acts in self.layers.values() for act in acts]
        return sites, _Together(self)


class _Together(Scanner):
    """Keeps, as truth values, on which tokens the sampled neurons are active."""

    def __init__(self, probe: Coactivation):
        self.probe = probe
        self.share = {
            act: max(1, probe.neurons // len(acts)) for acts in probe.layers.values() for act in acts
        }
        self.widths: dict[str, int] = {}
        self.active: dict[str, list[Tensor]] = {act: [] for act in self.share}

    def see(self, site: Site, rows: Float[Tensor, "N F"], start: int) -> None:
        act = site.module
        self.widths[act] = rows.shape[1]
        self.active[act].append(rows[:, self._sampled(act).to(rows.device)] > 0)

    def result(self) -> Observation:
        seen = Observation()
        for label, acts in self.probe.layers.items():
            active = torch.cat([torch.cat(self.active[act]) for act in acts], dim=1)
            before = np.cumsum([0, *(self.widths[act] for act in acts)])
            neurons = [self._sampled(act).numpy() + n for act, n in zip(acts, before, strict=False)]
            phi, varies = correlations(active)
            self._add(seen, label, phi, np.concatenate(neurons)[varies], active.shape[1])
        return seen

    def _sampled(self, act: str) -> Int[Tensor, " S"]:
        """The neurons of one part, in rising order."""
        drawn = torch.randperm(self.widths[act], generator=torch.Generator().manual_seed(0))
        return drawn[: self.share[act]].sort().values

    def _add(self, seen: Observation, label: str, phi: np.ndarray, neurons: np.ndarray, size: int) -> None:
        """What is reported of phi (M, M), the correlations of these neurons, M of a sample of `size`."""
        m, upper = len(phi), np.triu_indices(len(phi), 1)
        if m > 1:
            name = f"probe/coactivation/{label}"
            seen.scalars[f"{name}/mean_abs_phi"] = float(np.abs(phi[upper]).mean())
            seen.scalars[f"{name}/participation_ratio"] = m**2 / float(np.square(phi).sum())
        order = np.argsort(-phi[upper], kind="stable")[: self.probe.pairs]
        pairs = np.stack([neurons[side[order]] for side in upper], axis=1).astype(np.int32)
        eigenvalues = np.linalg.eigvalsh(phi)[::-1].astype(np.float32)
        ranks = min(self.probe.eigenvalues, size)
        n_pairs = min(self.probe.pairs, size * (size - 1) // 2)
        arrays = {
            "eigenvalue": (padded(eigenvalues[:ranks], ranks, np.nan), ("rank",)),
            "pair": (padded(pairs, n_pairs, -1), ("pair_rank", "side")),
            "phi": (padded(phi[upper][order].astype(np.float32), n_pairs, np.nan), ("pair_rank",)),
        }
        seen.arrays |= {f"{label}/coactivation/{name}": array for name, array in arrays.items()}


def correlations(active: Bool[Tensor, "N S"]) -> tuple[np.ndarray, np.ndarray]:
    """Pearson's correlations of the columns that are not constant, (M, M), and which of the S these are."""
    n = len(active)
    with torch.autocast(active.device.type, enabled=False):
        both = (active.float().T @ active.float()).double().cpu().numpy()  # counts: whole numbers are exact
    counts = both.diagonal()
    varies = (counts > 0) & (counts < n)
    both, counts = both[varies][:, varies], counts[varies]
    sd = np.sqrt(counts * (n - counts))
    return (n * both - np.outer(counts, counts)) / np.outer(sd, sd), varies


def padded(values: np.ndarray, length: int, fill: float) -> np.ndarray:
    """Made `length` long: a record has the same shape at every step."""
    rest = np.full((length - len(values), *values.shape[1:]), fill, dtype=values.dtype)
    return np.concatenate([values, rest])
