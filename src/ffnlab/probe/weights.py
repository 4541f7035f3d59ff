"""The vectors of each neuron: how long they are, and where they point."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, to_numpy


class Weights(Probe):
    """The rows of `up` and `gate`, the columns of `down`, and the angles at which inputs meet them.

    By neuron, with the mean over the layer's neurons as `probe/weights/L03/<name>`:
    - the arrays `L03/weights/{up_norm,gate_norm,down_norm} (neuron)`: Euclidean lengths, biases left out.
    - the arrays `L03/weights/{up_cosine,gate_cosine} (neuron)`: mean of |cos| between the neuron's row and
      the layer's other rows; in a layer of more than `sample` rows, the others among `sample` of them, drawn
      from seed 0. For independent random directions cos has sd 1/sqrt(D), and |cos| mean sqrt(2/(pi D)).
    Over all pairs of a probed position and a neuron, arccos(x . w / (|x| |w|)) in degrees, where w is the row
    in front of `act` (of `gate` where there is one, else of `up`) and x what that matrix is given: its mean,
    sd (divided by the number of pairs) and minimum as `probe/weights/L03/{angle,angle_sd,angle_min}_deg`. At
    90 degrees the pre-activation is 0, biases apart. An expert's neurons count the tokens that it gets.

    A matrix that an FFN lacks is not reported. Those of a low-rank FFN are the products. Where one row serves
    two opposite neurons (`paired`, `dual_path`), the second neuron's is its negative.
    """

    def __init__(self, *, every: int, sample: int):
        super().__init__(every=every)
        if sample < 1:
            raise UserError(f"probe.weights.sample is {sample}; expected at least 1.")
        self.sample = sample
        self.ffns: dict[str, list[str]] = {}  # label -> the modules that hold up, act and down
        self.fronts: dict[str, str] = {}  # such a module -> the matrix in front of its act

    def watch(self, names: list[str]) -> list[Site]:
        self.ffns = {label: [act.rpartition(".")[0] for act in acts] for label, acts in layers(names).items()}
        known = set(names)
        for ffn in (ffn for ffns in self.ffns.values() for ffn in ffns):
            front = "gate" if f"{ffn}.gate" in known else "up"
            if f"{ffn}.{front}" in known:
                self.fronts[ffn] = front
        return [Site(f"{ffn}.{front}", "input") for ffn, front in self.fronts.items()]

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        with torch.autocast(captured.tokens.device.type, enabled=False):  # in bf16 a cosine has two digits
            for label, ffns in self.ffns.items():
                parts = {ffn: vectors(model.get_submodule(ffn)) for ffn in ffns}
                for name, values in self._by_neuron(list(parts.values())).items():
                    seen.scalars[f"probe/weights/{label}/{name}"] = values.mean().item()
                    seen.arrays[f"{label}/weights/{name}"] = (to_numpy(values), ("neuron",))
                degrees = torch.cat([self._angles(ffn, own, captured) for ffn, own in parts.items()])
                if len(degrees):
                    name = f"probe/weights/{label}/angle"
                    seen.scalars[f"{name}_deg"] = degrees.mean().item()
                    seen.scalars[f"{name}_sd_deg"] = degrees.std(correction=0).item()
                    seen.scalars[f"{name}_min_deg"] = degrees.min().item()
        return seen

    def _by_neuron(self, parts: list[dict[str, Tensor]]) -> dict[str, Float[Tensor, " F"]]:
        found = {}
        for name in parts[0]:
            if all(name in own for own in parts):
                rows = torch.cat([own[name] for own in parts])
                found[f"{name}_norm"] = rows.norm(dim=1)
                if name != "down":
                    found[f"{name}_cosine"] = cosines(rows, self.sample)
        return found

    def _angles(self, ffn: str, own: dict[str, Tensor], captured: Captured) -> Float[Tensor, " n"]:
        """Of the pairs of one FFN, in degrees."""
        front = self.fronts.get(ffn)
        if front not in own:
            return captured.tokens.new_empty(0, dtype=torch.float32)
        x = captured.values[Site(f"{ffn}.{front}", "input")].float()
        cos = F.normalize(x[~x[:, 0].isnan()]) @ F.normalize(own[front]).T
        return cos.clamp(-1, 1).arccos().rad2deg().flatten()


def vectors(ffn: nn.Module) -> dict[str, Float[Tensor, "F D"]]:
    """What each neuron reads its input with (`up`, `gate`) and writes (`down`), a row each."""
    found = {name: matrix(getattr(ffn, name, None)) for name in ("up", "gate", "down")}
    own = {name: weight.detach().float() for name, weight in found.items() if weight is not None}
    if "down" in own:
        own["down"] = own["down"].T
        for name in own.keys() - {"down"}:
            if len(own[name]) < len(own["down"]):
                own[name] = torch.cat([own[name], -own[name]])[: len(own["down"])]
    return own


def matrix(module: Any) -> Tensor | None:
    """What a module multiplies by, (out, in): its weight, `out` times `into`, or `plus` and `minus` side by
    side; None if it is none of these.
    """
    if module is None:
        return None
    parts = {name for name, _ in module.named_children()}
    if parts == {"into", "out"}:
        return module.out.weight @ module.into.weight
    if parts == {"plus", "minus"}:
        return torch.cat([module.plus.weight, module.minus.weight], dim=1)
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None


def cosines(rows: Float[Tensor, "F D"], sample: int) -> Float[Tensor, " F"]:
    """Mean |cos| of each row with the others, or with those among `sample` of them; a row of zeros has 0."""
    n, unit = len(rows), F.normalize(rows)
    chosen = torch.arange(n) if n <= sample else torch.randperm(n, generator=torch.Generator().manual_seed(0))
    chosen = chosen[:sample].to(rows.device)
    cos = (unit @ unit[chosen].T).abs()
    cos[chosen, torch.arange(len(chosen), device=rows.device)] = 0.0  # a row is not among the others
    others = torch.full((n,), float(len(chosen)), device=rows.device)
    others[chosen] -= 1
    return cos.sum(1) / others
