"""SIGINT and SIGTERM ask a run to stop at its next step boundary, or inside an evaluation."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any


class Stopped(Exception):
    """What was being looked at is given up: the run was asked to stop."""


class Stop:
    """Remembers the first signal; a second one ends the process at once with 128 + its number."""

    def __init__(self) -> None:
        self.received: int | None = None  # by this process, at any moment
        self.told: int | None = None  # by any process of the run, as they agreed when they last asked

    @property
    def signum(self) -> int | None:
        """The signal that this process knows of."""
        return self.received or self.told

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside; the handlers of before are put back."""

        def on_signal(signum: int, frame: Any) -> None:
            if self.received is not None:
                os.write(2, b"stopped at once: what came after the last checkpoint is lost\n")
                raise SystemExit(128 + signum)
            self.received = signum

        before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def check(self) -> None:
        """Raises Stopped when this process was asked to stop."""
        if self.received is not None:
            raise Stopped
