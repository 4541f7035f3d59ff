"""The scalars that route the residual stream: skip gates, x0 lambdas, backout, smear, residual scales."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, as_tensor, nn

from ffnlab.probe.base import Captured, Observation, Probe, to_numpy

FACTOR = re.compile(r"blocks\.(\d+)\.residual\.(\w+)\.(scale|carry)")
OF_LAYER = re.compile(r"L\d\d/\w+")


class Gates(Probe):
    """The values in effect (a sigmoid gate is reported after the sigmoid).

    A module under `parts.*` says its values itself, by `values() -> dict[str, float | Tensor]`. A key that
    begins with a layer ('L03/x', 'L03/x0') becomes `probe/lambdas/L03/x`, another ('skip_01_04', 'backout')
    becomes `probe/gates/skip_01_04/value`. Learned residual scales are `probe/gates/L03/residual_ffn`, what
    is carried on of the stream `probe/gates/L03/residual_ffn_carry`. A vector is reported by its mean, with
    the array `gates/skip_01_04/value (channel)`.
    """

    def read(self, captured: Captured, model: nn.Module) -> Observation:
        seen = Observation()
        for name, given in _values(model):
            value = as_tensor(given).detach().float()
            seen.scalars[f"probe/{name}"] = value.mean().item()
            if value.numel() > 1:
                seen.arrays[name] = (to_numpy(value.flatten()), ("channel",))
        return seen


def _values(model: nn.Module) -> Iterator[tuple[str, float | Tensor]]:
    for name, module in model.named_modules():
        values: Any = getattr(module, "values", None)
        # A ModuleDict or ParameterDict inside a part has a `values` too, which is something else.
        if name.startswith("parts.") and values and not isinstance(module, nn.ModuleDict | nn.ParameterDict):
            for key, value in values().items():
                yield (f"lambdas/{key}" if OF_LAYER.fullmatch(key) else f"gates/{key}/value"), value
    for name, parameter in model.named_parameters():
        if match := FACTOR.fullmatch(name):
            kind = "" if match[3] == "scale" else f"_{match[3]}"
            yield f"gates/L{int(match[1]):02d}/residual_{match[2]}{kind}", parameter
