"""SIGINT and SIGTERM ask a run to stop at its next step boundary."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any


class Stop:
    """Remembers the first signal; a second one ends the process at once with 128 + its number."""

    def __init__(self) -> None:
        self.signum: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside; the handlers of before are put back."""

        def on_signal(signum: int, frame: Any) -> None:
            if self.signum is not None:
                print("stopped at once: what came after the last checkpoint is lost", file=sys.stderr)
                raise SystemExit(128 + signum)
            self.signum = signum

        before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
