"""Where numbers that are not finite began: one more pass over the batch, with a hook on every module."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK = re.compile(r"blocks\.(\d+)\.")


class Seen:
    """What the hooks of one pass found."""

    def __init__(self) -> None:
        self.activation: dict[str, Any] | None = None
        self.gradient: dict[str, Any] | None = None
        self.largest: dict[str, float] = {}

    def on_gradient(self, of: str, name: str) -> Callable[[Tensor], None]:
        """A hook on a tensor, which is the `of` (output or parameter) of `name`."""

        def look(grad: Tensor) -> None:
            if self.gradient is None and (bad := counted(grad)):
                self.gradient = {"of": of, "name": name, **placed(name), **bad}

        return look

    def on_output(self, name: str) -> Callable[..., None]:
        """A forward hook of the module `name`."""

        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return
            self.largest[name] = max(self.largest.get(name, 0.0), finite_max(output))
            if self.activation is None and (bad := counted(output)):
                inputs = [finite_max(x) for x in args if isinstance(x, Tensor)]
                self.activation = {
                    "module": name,
                    **placed(name),
                    **bad,
                    "largest_input": max(inputs, default=0.0),
                    "parameters": [key for key, p in module.named_parameters() if counted(p)],
                }
            if output.requires_grad:
                output.register_hook(self.on_gradient("output", name))

        return look


def diagnose(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    micro: Sequence[tuple[Tensor, Tensor]],
    precision: Callable[[], AbstractContextManager],
) -> dict[str, Any]:
    """What is not finite in a forward and backward pass of the eager model, in the order in which it appears.

    `losses`: the sum over each micro-batch. `parameters`: those that hold nan or inf already.
    `first_activation`: the first module whose output has some (but the model itself: its padded logits
    are -inf). `first_gradient`: the first gradient of the backward pass, by its parameter or by the module
    whose output it belongs to. `largest`: the largest finite |value| that each module put out.
    Random numbers are drawn, gradients are left at None.
    """
    seen, losses = Seen(), []
    model.zero_grad()
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(seen.on_output(name)).remove)
        for name, p in model.named_parameters():
            if p.requires_grad:
                hooks.callback(p.register_hook(seen.on_gradient("parameter", name)).remove)
        for x, y in micro:
            with precision():
                part = loss(x, y)
            part.backward()
            losses.append(str(float(part.detach())))
    model.zero_grad()
    return {
        "losses": losses,
        "parameters": {name: bad for name, p in model.named_parameters() if (bad := counted(p))},
        "first_activation": seen.activation,
        "first_gradient": seen.gradient,
        "largest": seen.largest,
    }


def words(found: dict[str, Any]) -> str:
    """The diagnosis in one clause; empty where nothing is wrong (any more)."""
    if "failed" in found:
        return f"no diagnosis: {found['failed']}"
    if first := found["first_activation"]:
        holds = "".join(f"; its {name} holds some" for name in first["parameters"][:1])
        return f"nan or inf begins in the output of {first['module']}, {amount(first)}{holds}"
    if names := list(found["parameters"]):
        return f"nan or inf stands in {', '.join(names[:3])}, {amount(found['parameters'][names[0]])}"
    if first := found["first_gradient"]:
        of = "the gradient of the output of " if first["of"] == "output" else "the gradient of "
        return f"nan or inf begins in {of}{first['name']}, {amount(first)}"
    return ""


def amount(bad: dict[str, Any]) -> str:
    """'3 of 64 values'."""
    return f"{bad['nan'] + bad['inf']:,} of {bad['of_values']:,} values"


def counted(tensor: Tensor) -> dict[str, int]:
    """How many values are nan or inf; empty where none is."""
    if tensor.isfinite().all():
        return {}
    return {
        "nan": int(tensor.isnan().sum()),
        "inf": int(tensor.isinf().sum()),
        "of_values": tensor.numel(),
    }


def finite_max(tensor: Tensor) -> float:
    """The largest |value| that is finite; 0 where none is."""
    values = tensor.detach().abs()
    values = values[values.isfinite()] if values.is_floating_point() else values
    return float(values.max()) if values.numel() else 0.0


def placed(name: str) -> dict[str, str]:
    """The label of the layer that a module or parameter belongs to, where it belongs to one."""
    match = _BLOCK.match(name)
    return {"layer": f"L{int(match[1]):02d}"} if match else {}
