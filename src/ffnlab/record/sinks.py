"""Copies of the record: whatever a sink does, training goes on."""

import queue
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Sink:
    """Gets a copy of what a run records; every method does nothing here. Order: start, then the rest, then
    finish.

    `start_s`, `call_s` and `finish_s` are the seconds that `Sinks` waits for a call before it gives the sink
    up.
    """

    start_s: float = 60.0
    call_s: float = 10.0
    finish_s: float = 30.0

    def start(self, info: dict[str, Any], config: dict[str, Any]) -> None:
        """Begin. `info` is run.json (id, name, ...) plus `path` (the run directory) and `resumed` (bool)."""

    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl; `row["step"]` rises. Values may be nan or inf."""

    def histograms(self, step: int, values: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Counts (n,) over fixed edges (n + 1,), by name."""

    def image(self, name: str, path: Path, step: int) -> None:
        """A PNG file."""

    def finish(self, status: str, summary: dict[str, Any]) -> None:
        """End with the run's status and its final numbers."""


class Sinks(list[Sink]):
    """A list of sinks that is itself called like one. No call raises or waits for ever.

    Each sink runs in a thread of its own and is waited for. One that raises gets a warning and no further
    call but `finish` (what it has so far may still be kept); one that does not come back in time gets a
    warning and none.
    """

    def start(self, info: dict[str, Any], config: dict[str, Any]) -> None:
        """Begin all sinks; see Sink.start."""
        self._workers = [_Worker(sink) for sink in self]
        for worker in self._workers:
            worker.call("start", worker.sink.start_s, info, config)

    def log(self, row: dict[str, Any]) -> None:
        """One row; see Sink.log."""
        self._each("log", row)

    def histograms(self, step: int, values: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Histograms by name; see Sink.histograms."""
        self._each("histograms", step, values)

    def image(self, name: str, path: Path, step: int) -> None:
        """A PNG file; see Sink.image."""
        self._each("image", name, path, step)

    def finish(self, status: str, summary: dict[str, Any]) -> bool:
        """End all sinks; see Sink.finish. Whether all of them took every call. Later calls do nothing."""
        workers, self._workers = getattr(self, "_workers", []), []
        for worker in workers:
            worker.call("finish", worker.sink.finish_s, status, summary)
        return all(worker.works for worker in workers)

    def _each(self, method: str, *arguments: Any) -> None:
        for worker in getattr(self, "_workers", []):
            worker.call(method, worker.sink.call_s, *arguments)


def finite_edges(edges: np.ndarray) -> np.ndarray:
    """Edges of a histogram as trackers take them: an open outer bin becomes as wide as its neighbour."""
    edges = np.array(edges, dtype=np.float64)
    if len(edges) > 3:
        if not np.isfinite(edges[0]):
            edges[0] = 2 * edges[1] - edges[2]
        if not np.isfinite(edges[-1]):
            edges[-1] = 2 * edges[-2] - edges[-3]
    return np.nan_to_num(edges, posinf=1e30, neginf=-1e30)


class _Worker:
    """Runs one sink's calls in a daemon thread: a thread can be left behind, a call cannot be interrupted."""

    def __init__(self, sink: Sink):
        self.sink = sink
        self._state = "works"  # works | failed (raised) | gone (never came back)
        self._jobs: queue.SimpleQueue[tuple[Callable, tuple, queue.SimpleQueue]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"sink {type(sink).__name__}", daemon=True).start()

    @property
    def works(self) -> bool:
        """Whether every call so far came back without an error."""
        return self._state == "works"

    def call(self, method: str, patience_s: float, *arguments: Any) -> None:
        if self._state == "gone" or (self._state == "failed" and method != "finish"):
            return
        answer: queue.SimpleQueue[BaseException | None] = (
            queue.SimpleQueue()
        )  # one a call: none is read twice
        self._jobs.put((getattr(self.sink, method), arguments, answer))
        try:
            error = answer.get(timeout=patience_s)
        except queue.Empty:
            return self._give_up("gone", f"{method} did not come back in {patience_s:.0f} s")
        if error is not None:
            self._give_up("failed", f"{method} failed: {type(error).__name__}: {error}")

    def _give_up(self, state: str, why: str) -> None:
        first, self._state = self._state == "works", state
        if first:
            name = type(self.sink).__name__
            warnings.warn(f"{name} is off for the rest of this run ({why}); the run goes on.", stacklevel=4)

    def _serve(self) -> None:
        while True:
            method, arguments, answer = self._jobs.get()
            try:
                method(*arguments)
            except BaseException as error:  # a tracker's SystemExit must not end the thread unanswered
                answer.put(error)
            else:
                answer.put(None)
