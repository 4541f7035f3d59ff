"""What a run puts on record when its numbers go bad: a diagnosis, its spikes."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffnlab.diagnose import words
from ffnlab.ending import quietly
from ffnlab.record.checkpoint import newest_complete
from ffnlab.record.rundir import RunDir, write_atomic
from ffnlab.session import Session
from ffnlab.train import Progress, Row
from ffnlab.update import Batch
from ffnlab.withheld import masked

MAX_REWINDS = 5  # of a run: a spike that comes back has another cause than its batches
MAX_SPIKES = 100  # that run.json lists


def diagnose(
    session: Session, run: Path, step: int, micro: Sequence[Batch], what: str, before: Mapping[str, Any]
) -> str:
    """Where numbers that are not finite began, of all processes: in diagnosis-000005.json, and in one clause.
    `before` is the row before.
    """
    found = session.processes.gather(session.diagnosis(step, micro))
    where = next(filter(None, map(words, found)), "all of it is finite when computed again")
    report = {"what": what, "where": where, "row_before": finite(before), "processes": found}
    path = run / f"diagnosis-{step:06d}.json"
    quietly(write_atomic, path, masked(json.dumps(report, indent=2)) + "\n")
    return f"{where} ({path.name})"


def spike(session: Session, rundir: RunDir, progress: Progress, row: Row) -> Path | None:
    """The next update is a spike: on the screen and in run.json; the checkpoint to go back to, if any."""
    step, back, then = progress.step + 1, None, "the run goes on"
    if session.train.on_spike == "rewind" and progress.rewinds >= MAX_REWINDS:
        then = f"the run went back {progress.rewinds} times before and goes on now"
    elif session.train.on_spike == "rewind":
        back = newest_complete(rundir.path)
        then = f"back to {back.name}" if back else "there is no checkpoint to go back to"
    numbers = {key: row[key] for key in ("train/loss", "optim/grad_norm", "optim/spike_score")}
    text = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
    warnings.warn(f"step {step} is a spike ({text}): {then}", stacklevel=2)
    entry = {"step": step, **numbers, "passed_over": progress.passed_over, "then": then}
    known = rundir.info().get("spikes", [])
    if entry not in known:  # a resume comes by again
        rundir.update(spikes=[*known, entry][-MAX_SPIKES:])
    return session.processes.from_leader(back)


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row is a finite number."""
    return {key: value for key, value in row.items() if value is not None and math.isfinite(value)}
