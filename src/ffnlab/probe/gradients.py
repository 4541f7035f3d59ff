"""How strongly the loss pulls at every module and every neuron, and how far an update moves them."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.probe.base import Captured, Observation, Probe, Site, layers, to_numpy
from ffnlab.probe.matrices import by_neuron, linears, parts, ways


class Gradients(Probe):
    """The gradient of an update (mean loss over its tokens, before clipping), and what the update did.

    By module that has parameters of its own, `probe/gradients/blocks.3.ffn.up/`
    - `norm`: Euclidean norm of their gradient;
    - `update_ratio`: |w_after - w_before| / |w_before|, left out where w_before is 0 (output matrices start
      there).
    By neuron, the arrays `L03/gradients/{up_norm,gate_norm,down_norm} (neuron)`: the norm of its row of `up`
    (and `gate`) and of its column of `down`; of low-rank products, in the factor that has one; what layers
    share has one gradient, the sum over them. `probe/gradients/L03/zero_frac`: share of the neurons of which
    all these are exactly 0: a ReLU that no token of the batch activated (E47).
    Step 0 has no gradient. Until the update is done a copy of the parameters is kept.
    """

    wants_gradients = True

    def __init__(self, *, every: int):
        super().__init__(every=every)
        self.layers: dict[str, list[str]] = {}
        self.seen = Observation()
        self.before: dict[str, Tensor] = {}

    def watch(self, names: list[str]) -> list[Site]:
        self.layers = layers(names)
        return []

    def on_gradients(self, model: nn.Module) -> None:
        self.seen = Observation()
        self.before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for module, own in by_module(model).items():
            self.seen.scalars[f"probe/gradients/{module}/norm"] = length([grad(p) for p in own.values()])
        for label, acts in self.layers.items():
            found = parts(model, acts)
            norms = {way: torch.cat([norm(part, way) for part in found]) for way in ways(found[0])}
            for way, each in norms.items():
                self.seen.arrays[f"{label}/gradients/{way}_norm"] = (to_numpy(each), ("neuron",))
            if norms:
                zero = torch.stack(list(norms.values())).eq(0).all(0)
                self.seen.scalars[f"probe/gradients/{label}/zero_frac"] = zero.float().mean().item()

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen, before, self.seen, self.before = self.seen, self.before, Observation(), {}
        for module, own in by_module(model).items() if before else ():
            if size := length([before[name] for name in own]):
                moved = length([p.detach() - before[name] for name, p in own.items()])
                seen.scalars[f"probe/gradients/{module}/update_ratio"] = moved / size
        return seen


def by_module(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters by the module that holds them, each once and under its full name."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(name.rpartition(".")[0], {})[name] = parameter
    return found


def grad(parameter: Tensor) -> Tensor:
    """The gradient; zeros where the loss did not depend on the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def length(tensors: list[Tensor]) -> float:
    """Euclidean norm of all of them together."""
    return torch.stack([torch.linalg.vector_norm(t.float()) for t in tensors]).norm().item()


def norm(part: nn.Module, way: str) -> Float[Tensor, " F"]:
    """The norm of the gradient of each neuron of a part on one of its ways."""
    grads = [grad(linear.weight) for linear in linears(part, way)]
    return by_neuron(part, way, grads).float().norm(dim=1)
