"""What a sweep shows: a live line per running job and the table at the end, read from the run directories."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ffnlab import foreign
from hydra_plugins.ffnlab_sweep._jobs import Job

OUTPUTS = Path("outputs")
UNFINISHED = ("invalid", "interrupted", "not started")
FINISHED = ("done", "diverged")  # a run that diverged is a result: the same config would do it again


def console() -> Console:
    """The terminal, or wide plain lines where there is none, so that no path is cut."""
    plain = Console(highlight=False, soft_wrap=True)
    return plain if plain.is_terminal else Console(highlight=False, width=200)


def busy(text: str) -> AbstractContextManager[Any]:
    """A spinner in a terminal."""
    screen = console()
    return screen.status(text) if screen.is_terminal else nullcontext()


def status(out: Path) -> str | None:
    """The status in run.json; None when there is no readable one."""
    try:
        return foreign.read_json(out / "run.json").get("status")
    except (OSError, ValueError, AttributeError):
        return None


def finished(out: Path) -> bool:
    """Whether a run is over for good, so that a sweep need not start it."""
    return status(out) in FINISHED


def last_row(out: Path, key: str = "step") -> dict[str, Any]:
    """The last row of metrics.jsonl that has `key`; {} when there is none. Reads the end of the file only."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 18)))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = foreign.parse_json(line)
        except ValueError:  # torn, or cut by the seek
            continue
        if isinstance(row, dict) and row.get(key) is not None:
            return row
    return {}


def final_loss(out: Path) -> float | None:
    """The last validation loss of a run that is done, inf of one that diverged, None of any other."""
    word = status(out)
    return (
        last_row(out, "val/loss").get("val/loss")
        if word == "done"
        else math.inf
        if word == "diverged"
        else None
    )


class View:
    """The running sweep: one line when a job starts or ends, and below them, in a terminal, what runs now,
    how many jobs are over, when the rest will be, and the best loss so far.

    `earlier` are jobs of the same sweep that were finished before it was started.
    """

    def __init__(self, total: int, earlier: Sequence[Path] = ()):
        self.console, self.total = console(), total + len(earlier)
        self.live = Live(console=self.console, refresh_per_second=2) if self.console.is_terminal else None
        self.started_count = self.ended_count = len(earlier)
        self.failed_count = 0
        self.start, self.steps = time.monotonic(), dict[Path, int]()
        self.done = dict[
            Path, tuple[float, float]
        ]()  # the part of a job that was done when first seen, and now
        self.best: tuple[float, str] | None = None
        for out in earlier:
            self._judge(out)

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update(Text(""))
            self.live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, markup=False)

    def started(self, out: Path) -> None:
        """A job was started."""
        self.started_count += 1
        self.say(f"[{self.started_count}/{self.total}] start  {out.name}")

    def ended(self, out: Path, seconds: float, problem: str | None, log: Path) -> None:
        """A job is over; of a failed one the end of its log is shown."""
        self.ended_count += 1
        if problem is None:
            self.done[out] = (self.done.get(out, (0.0, 0.0))[0], 1.0)
            end = f"val/loss {number(self._judge(out))}  {clock(seconds)}"
            self.say(f"[{self.ended_count}/{self.total}] {status(out) or 'done'} {out.name}  {end}")
            return
        self.failed_count += 1
        word = "stop  " if problem == "interrupted" else "FAILED"
        self.say(f"[{self.ended_count}/{self.total}] {word} {out.name}: {problem}; log: {log}")
        for line in tail(log):
            self.say(f"    | {line}")

    def tick(self, running: Sequence[tuple[Path, float]]) -> None:
        """Show the running jobs: (folder, seconds)."""
        if not self.live:
            return
        lines = [self._line(out, seconds) for out, seconds in running]
        bad = f" · {self.failed_count} failed" if self.failed_count else ""
        best = f" · best val/loss {self.best[0]:.4f} ({self.best[1]})" if self.best else ""
        eta = clock(self._left([out for out, _ in running]))
        last = f"{self.ended_count}/{self.total} jobs{bad} · ETA {eta}{best}"
        self.live.update(Text("\n".join([*lines, last]), no_wrap=True, overflow="ellipsis"))

    def _judge(self, out: Path) -> float | None:
        """The loss of a finished job, which may be the best."""
        loss = final_loss(out)
        if loss is not None and math.isfinite(loss):
            self.best = min(self.best or (loss, out.name), (loss, out.name))
        return loss

    def _line(self, out: Path, seconds: float) -> str:
        row = last_row(out)
        if out not in self.steps:
            try:
                self.steps[out] = foreign.read_yaml(out / "config.yaml")["train"]["steps"]
            except (OSError, KeyError, TypeError, yaml.YAMLError):
                return f"  {out.name}  starting  {clock(seconds)}"
        step = row.get("step", 0)
        part = step / max(1, self.steps[out])
        self.done[out] = (self.done.get(out, (part, 0.0))[0], part)
        loss = number(row.get("train/loss", row.get("val/loss")))
        return f"  {out.name}  step {step}/{self.steps[out]}  loss {loss}  {clock(seconds)}"

    def _left(self, running: Sequence[Path]) -> float | None:
        """Seconds until all jobs are over, at the rate at which steps were done; None before there is one."""
        work = sum(now - first for first, now in self.done.values())
        waiting = self.total - self.ended_count - len(running)
        left = waiting + sum(1 - self.done.get(out, (0.0, 0.0))[1] for out in running)
        return left * (time.monotonic() - self.start) / work if work > 0 else None


def table(jobs: Sequence[Job], notes: Mapping[Path, str], fresh: set[Path]) -> int:
    """Print one row per job; the number of jobs that did not come to an end."""
    rows = Table(
        title=f"sweep: {len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}",
        title_justify="left",
        show_edge=False,
    )
    for name in ("job", "status", "val/loss", "time"):
        rows.add_column(name, justify="right" if name in ("val/loss", "time") else "left", no_wrap=True)
    rows.add_column("out", overflow="fold")
    failed = 0
    for job in jobs:
        word = "invalid" if job.problems else notes.get(job.out) or status(job.out) or "failed"
        if word not in (*FINISHED, *UNFINISHED):
            word = f"failed: {word}" if job.out in notes else "failed"
        failed += word not in FINISHED
        word += "" if job.problems or job.out in fresh else " (before)"
        row = {} if job.problems else last_row(job.out)
        loss, seconds = number(None if job.problems else final_loss(job.out)), clock(row.get("time_s"))
        name = (job.label or "(job)") if job.problems else job.out.name[:-9]  # without the hash
        rows.add_row(*(Text(t) for t in (name, word, loss, seconds, "" if job.problems else str(job.out))))
    screen = console()
    screen.print(rows)
    if failed:
        screen.print(
            f"{failed} of {len(jobs)} not finished; the same command goes on with those", markup=False
        )
    return failed


def tail(log: Path, lines: int = 3) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        text = log.read_bytes()[-4096:].decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip()[:160] for line in text.splitlines() if line.strip()][-lines:]


def number(value: Any) -> str:
    """A loss as text."""
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def clock(seconds: Any) -> str:
    """Seconds as h:mm:ss or m:ss."""
    if not isinstance(seconds, int | float):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
