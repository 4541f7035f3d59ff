"""What the backends share about patterns: where rows start, and the transposed form that was made last."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Turned = TypeVar("Turned")


def row_starts(counts: Tensor) -> Tensor:
    """Counts (n,) -> where each row starts, and last where the last one ends (n + 1,)."""
    starts = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, out=starts[1:])
    return starts


class Last(threading.local, Generic[Turned]):
    """The pattern that this thread transposed last. A backward pass needs the same one for every matrix of
    an FFN; the pattern itself is held, so that no other can come to lie at its address meanwhile.
    """

    key: tuple[int, ...] = ()
    held: tuple[Tensor, ...] = ()
    found: Turned | None = None

    def of(self, crow: Tensor, idx: Tensor, n: int, make: Callable[[Tensor, Tensor, int], Turned]) -> Turned:
        """What `make` gives for this pattern of n columns: made anew only for another one."""
        if idx.is_inference():  # such tensors do not count their versions
            return make(crow, idx, n)
        key = (crow.data_ptr(), idx.data_ptr(), crow.shape[0], idx.shape[0], n, crow._version, idx._version)
        if self.found is None or self.key != key:
            self.found = make(crow, idx, n)
            self.key, self.held = key, (crow, idx)
        return self.found
