"""Whether the tokens that activate a neuron differ from the rest."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.probe.base import Observation, Probe, Scanner, Site, layers, to_numpy


class Selection(Probe):
    """How far the mean input of the tokens that activate a neuron lies from that of all tokens (E53).

    Over the n tokens of the scan, with x what the matrix in front of `act` is given (of `gate` where there is
    one, else of `up`), v the mean of |x - mean x|^2, and m_j the mean of x over the n_j tokens on which
    neuron j is active (post-activation > 0):
    - the array `L03/selection/shift (neuron)`: |m_j - mean x| / sqrt(v); NaN where that is none or all.
    - `probe/selection/L03/shift`: its root mean square over the other neurons.
    - `probe/selection/L03/chance_shift`: what that would be if each n_j tokens were drawn at random,
      (1/n_j - 1/n) n / (n - 1) in the square.
    A neuron that is active on a share p of tokens that lie evenly on a sphere in D dimensions has
    phi(z) / (p sqrt(D)), z the normal quantile of p: 0.50, 0.80, 1.16 and 1.75 over sqrt(D) at 70, 50, 30 and
    10 % (`ffnlab.analysis.geometry.selected_shift`). The fewer tokens, the more they have in common.

    An expert is measured on the tokens that it gets.
    """

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.layers: dict[str, list[str]] = {}
        self.fronts: dict[str, str] = {}  # act -> the matrix in front of it

    def watch(self, names: list[str]) -> list[Site]:
        known = set(names)
        for label, acts in layers(names).items():
            for act in acts:
                ffn = act.rpartition(".")[0]
                front = next((f"{ffn}.{way}" for way in ("gate", "up") if f"{ffn}.{way}" in known), None)
                if front:
                    self.fronts[act] = front
            self.layers[label] = [act for act in acts if act in self.fronts]
        return []

    def scanner(self, model: nn.Module) -> tuple[list[Site], Scanner]:
        inputs = [Site(front, "input") for front in self.fronts.values()]
        return [*inputs, *(Site(act, "output") for act in self.fronts)], _Means(self)


class _Means(Scanner):
    """Adds up, by part, the inputs of all tokens and of those that activate each neuron."""

    def __init__(self, probe: Selection):
        self.probe = probe
        self.acts = {front: act for act, front in probe.fronts.items()}
        self.inputs: dict[str, Tensor] = {}  # of this chunk, by act, until the activations come
        self.sums: dict[str, list[Tensor]] = {}  # by act: n (), x (D,), |x|^2 (), n_j (F,), x of j (F, D)

    def see(self, site: Site, rows: Float[Tensor, "N F"], start: int) -> None:
        if site.side == "input":
            self.inputs[self.acts[site.module]] = rows.clone()
            return
        x, active = self.inputs.pop(site.module).float(), (rows > 0).float()
        own = ~x[:, 0].isnan()  # an expert has no input on the tokens that it does not get
        x, active = x[own], active[own]
        with torch.autocast(x.device.type, enabled=False):
            new = [own.sum(), x.sum(0), x.square().sum(), active.sum(0), active.T @ x]
        old = self.sums.get(site.module)
        new = [value.double() for value in new]
        self.sums[site.module] = new if old is None else [a + b for a, b in zip(old, new, strict=True)]

    def result(self) -> Observation:
        seen = Observation()
        for label, acts in self.probe.layers.items():
            parts = [shifts(*self.sums[act]) for act in acts]
            if not parts:
                continue
            shift, chance = (torch.cat(values) for values in zip(*parts, strict=True))
            seen.arrays[f"{label}/selection/shift"] = (to_numpy(shift), ("neuron",))
            known = ~shift.isnan()
            if known.any():
                name = f"probe/selection/{label}"
                seen.scalars[f"{name}/shift"] = shift[known].square().mean().sqrt().item()
                seen.scalars[f"{name}/chance_shift"] = chance[known].square().mean().sqrt().item()
        return seen


def shifts(
    n: Tensor, x: Float[Tensor, " D"], square: Tensor, n_j: Float[Tensor, " F"], x_j: Float[Tensor, "F D"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
    """Shift and chance shift of each neuron, from sums; NaN where it is active on no token or on all."""
    mean = x / n
    variance = square / n - mean.square().sum()
    shift = (x_j / n_j[:, None] - mean).norm(dim=1) / variance.clamp(min=0).sqrt()
    chance = ((1 / n_j - 1 / n) * n / (n - 1)).clamp(min=0).sqrt()
    known = (n_j > 0) & (n_j < n) & shift.isfinite()
    return torch.where(known, shift, torch.nan), torch.where(known, chance, torch.nan)
