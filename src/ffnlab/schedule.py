"""Schedules: factor on the learning rate of update k (1 <= k <= steps), pure functions of k.

A resume needs no state of theirs.
"""

import math


class Constant:
    """min(1, k / w), w = round(warmup_frac * steps)."""

    def __init__(self, *, steps: int, warmup_frac: float):
        self.steps = steps
        self.warmup = round(warmup_frac * steps)

    def warm(self, step: int) -> float:
        """Linear warm-up: k / w up to update w, then 1."""
        return min(1.0, step / self.warmup) if self.warmup else 1.0

    def __call__(self, step: int) -> float:
        return self.warm(step)


class Trapezoid(Constant):
    """Warm-up, 1, then linear to `floor` over the last d = decay_frac * steps updates: floor + (1 - floor)
    min(1, (steps - k + 1) / d).
    """

    def __init__(self, *, steps: int, warmup_frac: float, decay_frac: float, floor: float):
        super().__init__(steps=steps, warmup_frac=warmup_frac)
        self.decay, self.floor = decay_frac * steps, floor

    def __call__(self, step: int) -> float:
        left = min(1.0, (self.steps - step + 1) / self.decay) if self.decay else 1.0
        return self.warm(step) * (self.floor + (1 - self.floor) * left)


class Cosine(Constant):
    """Warm-up over w updates, then floor + (1 - floor) (1 + cos(pi (k - 1 - w) / (steps - w))) / 2."""

    def __init__(self, *, steps: int, warmup_frac: float, floor: float):
        super().__init__(steps=steps, warmup_frac=warmup_frac)
        self.floor = floor

    def __call__(self, step: int) -> float:
        if step <= self.warmup:
            return self.warm(step)
        done = (step - 1 - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
