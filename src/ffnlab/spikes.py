"""Loss spikes: an update far above those before it, in its loss or in the norm of its gradient."""

import math
from collections.abc import Sequence

Pair = tuple[float, float]  # loss, gradient norm


def spike_score(recent: Sequence[Pair], window: int, now: Pair) -> float:
    """How many standard deviations (of a sample, n - 1) `now` lies above the mean of the `recent` updates;
    the larger of the two for the loss and for the gradient norm.

    0 until half of the window is filled, and where the recent values do not differ. The rule of OLMo's
    SkipStepAdamW (window 128, 6 deviations), whose window however takes in numbers that are not finite; here
    those never come so far.
    """
    if len(recent) < max(2, window // 2):
        return 0.0
    return max(_score(before, value) for before, value in zip(zip(*recent, strict=True), now, strict=True))


def remember(recent: list[Pair], window: int, now: Pair) -> None:
    """`now` becomes the newest of the `window` updates that are remembered."""
    recent.append(now)
    del recent[:-window]


def _score(before: Sequence[float], value: float) -> float:
    mean = math.fsum(before) / len(before)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in before) / (len(before) - 1))
    return (value - mean) / deviation if deviation > 0 else 0.0
