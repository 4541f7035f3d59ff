"""The run as one watches it: a live table on a terminal, plain lines elsewhere."""

import math
import re
import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ffnlab.record.metrics import plain
from ffnlab.record.sinks import Sink

_ACTIVE = re.compile(r"probe/activity/L\d+/active_frac")
_C = re.compile(r"probe/threshold/L\d+/c")
COLUMNS = ("eta", "loss", "val", "tok/s", "active", "C")
_LINES = 50  # about so many plain lines a run


class ConsoleSink(Sink):
    """Step, loss, validation loss, tokens per second, ETA, mean active fraction and mean C over layers.

    A column whose metric has not been logged yet is absent. On a terminal the last value of each is shown
    live and every validation adds a line; elsewhere the first ten steps, about fifty more and every
    validation give a line.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console()

    def start(self, info: dict[str, Any], config: dict[str, Any]) -> None:
        """Begin to show; the number of steps is `config["train"]["steps"]`."""
        self._steps = int(config["train"]["steps"])
        self._seen: dict[str, str] = {}
        self._pace: deque[tuple[float, int]] = deque(maxlen=50)
        self._drawn = self._printed = -math.inf
        if info.get("resumed"):
            print(f"going on with {info['path']}", flush=True)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        if self._live:
            self._live.start()

    def log(self, row: dict[str, Any]) -> None:
        """Show one row."""
        now, step = time.monotonic(), int(row["step"])
        self._pace.append((now, step))
        self._seen |= columns(row) | ({"eta": eta} if (eta := self._eta()) else {})
        validated = "val/loss" in row
        if self._live is None:
            if (
                step <= 10
                or step % max(1, self._steps // _LINES) == 0
                or validated
                or now - self._printed > 10
            ):
                self._print(step, now)
        elif validated or step >= self._steps or now - self._drawn > 0.2:
            if validated:
                self._print(step, now)
            self._live.update(self._table(step), refresh=True)
            self._drawn = now

    def finish(self, status: str, summary: dict[str, Any]) -> None:
        """Leave the last table on the screen and give the cursor back."""
        if self._live:
            self._live.stop()

    def _print(self, step: int, now: float) -> None:
        width = len(str(self._steps))
        text = "  ".join(f"{name} {self._seen[name]}" for name in COLUMNS if name in self._seen)
        self.console.print(f"step {step:>{width}}/{self._steps}  {text}", highlight=False, soft_wrap=True)
        self._printed = now

    def _table(self, step: int) -> Group:
        table = Table(box=None, pad_edge=False)
        shown = [name for name in COLUMNS if name in self._seen]
        for name in ("step", *shown):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(f"{step}/{self._steps}", *(self._seen[name] for name in shown))
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(ProgressBar(total=self._steps, completed=step, width=60))
        return Group(table, bar)

    def _eta(self) -> str | None:
        (then, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first:
            return None
        seconds = round((now - then) / (last - first) * max(0, self._steps - last))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def columns(row: dict[str, Any]) -> dict[str, str]:
    """What is shown of a metrics row: {"loss": "5.1234", "tok/s": "12,345"}; absent keys stay absent."""
    found = {
        "loss": _number(row.get("train/loss"), ".4f"),
        "val": _number(row.get("val/loss"), ".4f"),
        "tok/s": _number(row.get("perf/tok_per_s"), ",.0f"),
        "active": _number(_mean(row, _ACTIVE), ".3f"),
        "C": _number(_mean(row, _C), ".4f"),
    }
    return {name: text for name, text in found.items() if text is not None}


def _number(value: Any, form: str) -> str | None:
    return None if value is None else format(float(plain(value)), form)


def _mean(row: dict[str, Any], names: re.Pattern) -> float | None:
    values = [float(plain(value)) for key, value in row.items() if names.fullmatch(key) and value is not None]
    return sum(values) / len(values) if values else None
