"""The bare matrix products of a module, timed without the module."""

import math
import time
from collections import Counter

import torch
from torch import nn

from ffnlab.nn.count import walk
from ffnlab.nn.rate import synchronize


class Products:
    """The matrix products of all `nn.Linear` of a module and of their backward passes, and nothing else."""

    def __init__(self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.counts = Counter(
            (round(tokens * share), part.in_features, part.out_features)
            for _, part, share in walk(module)
            if isinstance(part, nn.Linear)
        )
        self.operands = {
            (n, i, o): [torch.randn(size).to(device, dtype) for size in ((n, i), (o, i), (n, o))]
            for n, i, o in self.counts
        }
        self.flops = sum(6 * math.prod(shape) * times for shape, times in self.counts.items())
        self.times: list[float] = []

    def warm_up(self) -> None:
        self.seconds()

    def round(self) -> None:
        self.times.append(self.seconds())

    def seconds(self) -> float:
        """y = x W^T, then the gradients of x and W; each shape measured once and counted as often as it is
        there.
        """
        whole = 0.0
        for shape, (x, weight, y) in self.operands.items():
            synchronize(self.device)
            start = time.perf_counter()
            for a, b in ((x, weight.T), (y, weight), (y.T, x)):
                torch.mm(a, b)
            synchronize(self.device)
            whole += self.counts[shape] * (time.perf_counter() - start)
        return whole
