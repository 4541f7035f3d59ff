"""Loss on a fixed set of batches."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def evaluate(
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    precision: Callable[[], AbstractContextManager],
) -> float:
    """Mean cross-entropy in nats per token; `loss` gives the sum over the targets that are not -100."""
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in batches:
            with precision():
                total += float(loss(x, y))
            count += int((y >= 0).sum())
    return total / count


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """loss / (ln 2 * bytes per token): comparable across tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token
