"""Wall time of training, told apart from that of evaluation, checkpoints and probes."""

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize() -> None:
    """Let the accelerator finish, so that what is timed pays for its own work only."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Clock:
    """Wall time since the last row, evaluation and checkpoints left out, probes counted apart."""

    def __init__(self) -> None:
        self.row = self.last = time.perf_counter()
        self.outside = self.probe = 0.0

    def measure(self, row: dict[str, float], tokens: int, steps: int) -> None:
        """Add perf/tok_per_s, perf/step_ms and perf/probe_frac to a row of `steps` updates, and start the
        next row.
        """
        now = time.perf_counter()
        seconds = max(now - self.row - self.outside, 1e-9)
        row |= {
            "perf/tok_per_s": tokens / seconds,
            "perf/step_ms": 1e3 * seconds / steps,
            "perf/probe_frac": self.probe / seconds,
        }
        self.row, self.outside, self.probe = now, 0.0, 0.0

    def session(self) -> float:
        """Seconds since this was last asked."""
        self.last, before = time.perf_counter(), self.last
        return self.last - before

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """call(*args), its seconds added to `outside` or `probe`."""
        synchronize()
        start = time.perf_counter()
        out = call(*args)
        synchronize()
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)
        return out
