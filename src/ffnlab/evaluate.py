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
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> float:
    """Mean cross-entropy in nats per token; `loss` gives the sum over the targets that are not -100.

    `add_up` sums tensors over processes that each have a part of the batches.
    """
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for x, y in batches:
            with precision():
                total += loss(x, y).cpu().double()
            count += (y >= 0).sum().cpu()
    add_up([total, count])
    return float(total / count)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """loss / (ln 2 * bytes per token): comparable across tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token
