"""One update: the gradient of the mean loss over all counted targets, its norm, and the step."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def gradients(
    loss: Callable[[Tensor, Tensor], Tensor],
    micro: Sequence[Batch],
    precision: Callable[[], AbstractContextManager],
    scaler: Any,
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> tuple[float, int]:
    """Accumulate this process's part of the gradient of the mean loss over all counted targets.

    Returns that mean and how many targets there are, of all processes: `add_up` sums tensors over them.
    """
    count = torch.stack([(y >= 0).sum() for _, y in micro]).sum()
    add_up([count])
    total = torch.zeros((), device=count.device)
    for x, y in micro:
        with precision():
            part = loss(x, y) / count
        scaler.scale(part).backward()
        total += part.detach()
    add_up([total])
    return float(total), int(count)


def grad_norm(parameters: Iterable[nn.Parameter], clip: float | None) -> float:
    """Euclidean norm of all gradients, which are scaled down to `clip` when it is larger."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip))


def update(optimizer: Any, scaler: Any, leave_out: bool) -> None:
    """Step; or leave the step out, because a gradient is not finite: all parameters keep their values.

    In fp16 that is how the scale of the loss finds its size: it halves.
    """
    if leave_out:
        if scaler.is_enabled():
            scaler.update(scaler.get_scale() / 2)
        return
    for inner in optimizer.optimizers:
        scaler.step(inner)
    scaler.update()
