"""From the names of parameters here to the names elsewhere, and back."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]


def modules(table: Mapping[str, str], n_layers: int) -> dict[str, str]:
    """The table with every `{i}` written out for the layers 0 to n_layers - 1."""
    return {
        here.format(i=i): there.format(i=i)
        for here, there in table.items()
        for i in (range(n_layers) if "{i}" in here else range(1))
    }


def count_layers(names: Iterable[str]) -> int:
    """One more than the highest layer that a name speaks of: `blocks.3.`, `h.3.`, `layers.3.`."""
    found = (re.match(r"(?:.*\.)?(?:blocks|h|layers)\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def renamed(state: Mapping[str, Tensor], pairs: Mapping[str, str]) -> State:
    """The tensors under the names of other modules; weight stays weight, and bias bias."""
    out = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        out[f"{pairs[module]}.{leaf}"] = tensor
    return out


def completed(state: Mapping[str, Tensor], *, norms: Iterable[str], biased: Iterable[str]) -> State:
    """The state with gains of 1 and biases of 0 where `norms` and `biased` modules have none: the same
    function in a format that always has them.
    """
    state = dict(state)
    d_model = state["embed.weight"].shape[1]
    for name in norms:
        if f"{name}.weight" not in state:
            state[f"{name}.weight"] = torch.ones(d_model)
    for name in biased:
        if f"{name}.bias" not in state:
            state[f"{name}.bias"] = torch.zeros(state[f"{name}.weight"].shape[0])
    return state
