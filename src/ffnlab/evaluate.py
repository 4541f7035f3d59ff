"""Loss on a fixed set of batches."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def evaluate(
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    precision: Callable[[], AbstractContextManager],
    lengths: Tensor | None = None,
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> tuple[float, float | None]:
    """Mean cross-entropy in nats per token, and in bits per byte where the `lengths` of all tokens in bytes
    are known.

    `loss` gives the sum over the targets that are not -100; bits per byte = that sum / (ln 2 * bytes of the
    targets),
    comparable across tokenizers. `add_up` sums tensors over processes that each have a part of the batches.
    """
    total, count, size = torch.zeros(3, dtype=torch.float64).unbind()
    with torch.no_grad():
        for x, y in batches:
            with precision():
                total += loss(x, y).cpu().double()
            targets = y[y >= 0].cpu()
            count += targets.numel()
            if lengths is not None:
                size += lengths[targets].sum()
    add_up([total, count, size])
    per_byte = float(total / size) / math.log(2) if size > 0 else None
    return float(total / count), per_byte
