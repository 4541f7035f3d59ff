"""The matrices on either side of the neurons: `up` and `gate` read the stream for them, `down` writes for
them.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def parts(model: nn.Module, acts: list[str]) -> list[nn.Module]:
    """The modules that hold `up`, `down` (and `gate`) of a layer of `base.layers`: an FFN, or experts."""
    return [model.get_submodule(act.rpartition(".")[0]) for act in acts]


def ways(part: nn.Module) -> list[str]:
    """Which of `up`, `gate` and `down` a part has."""
    has = [way for way in ("up", "gate", "down") if isinstance(getattr(part, way, None), nn.Module)]
    return [way for way in has if linears(part, way)]


def linears(part: Any, way: str) -> list[nn.Linear]:
    """The Linears of a way that have a row (up, gate) or a column (down) for each neuron.

    A way of several one after the other (low rank) touches the neurons with one of them; a `down` of several
    side by side (dual path) has the neurons of its first, then those of its second.
    """
    found = [module for module in part.get_submodule(way).modules() if isinstance(module, nn.Linear)]
    if way != "down":
        return found[-1:]
    taken: list[nn.Linear] = []
    for linear in found:
        if sum(one.in_features for one in taken) < part.d_ff:
            taken.append(linear)
    return taken


def by_neuron(part: Any, way: str, matrices: list[Float[Tensor, "n m"]]) -> Float[Tensor, "F _"]:
    """Matrices shaped as the weights of `linears(part, way)` -> a row for each of the F neurons.

    Where one input vector serves two neurons (paired: V and -V) both get its row, the second one negated.
    """
    if way == "down":
        return torch.cat(matrices, dim=1).T
    (rows,) = matrices
    return rows if len(rows) == part.d_ff else torch.cat([rows, -rows])[: part.d_ff]


def neuron_weights(part: Any, way: str) -> Float[Tensor, "F _"]:
    """The vector of length D by which each neuron reads (up, gate) or writes (down); no copy where a Linear
    holds it.

    Of a product of matrices it is a row or a column of the product.
    """
    module = part.get_submodule(way)
    if isinstance(module, nn.Linear):
        return by_neuron(part, way, [module.weight])
    n_in = part.d_ff if way == "down" else part.d_model
    device = linears(part, way)[0].weight.device
    unit = torch.eye(n_in, device=device)
    with torch.autocast(device.type, enabled=False):
        outputs = module(unit) - module(torch.zeros_like(unit))  # of the unit vectors, without a bias
    return outputs if way == "down" else by_neuron(part, way, [outputs.T])
