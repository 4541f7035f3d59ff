"""One run: its directory, its lock, its processes."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ffnlab.device import set_threads
from ffnlab.errors import UserError
from ffnlab.processes import Processes, processes
from ffnlab.record.rundir import RunDir, new_name
from ffnlab.recorded import AtEnd, Recorded
from ffnlab.session import Session
from ffnlab.stop import Stop
from ffnlab.train import Diverged, Row, train
from ffnlab.validate import validate

# Keys that may differ when a run is resumed.
SAME_RUN = {"out", "logger", "study", "arm", "checkpoint.keep_last"}


def run(cfg: Mapping[str, Any], choices: Mapping[str, Any], at_end: AtEnd | None = None) -> Row:
    """Train what a plain configuration says, in its run directory; returns the final metrics.

    A finished run is not run again. Under torchrun the processes share the work and the first one records.
    `at_end` draws pictures of the finished run directory, which the trackers get. Raises UserError for wrong
    input,
    Diverged for a non-finite loss, and SystemExit(130 or 143) after a signal, when all is saved.
    """
    validate(cfg)
    with processes(cfg["train"]["device"]) as these:
        return lead(cfg, choices, these, at_end) if these.leads else follow(cfg, these)


def lead(cfg: Mapping[str, Any], choices: Mapping[str, Any], these: Processes, at_end: AtEnd | None) -> Row:
    """The process that owns the run directory."""
    out = Path(cfg["out"] or Path("outputs") / new_name(choices["ffn"], choices["act"], cfg["seed"]))
    grows = cfg["schedule"] == {
        "_target_": "ffnlab.schedule.Constant",
        "warmup_frac": 0,
    }  # blind to train.steps
    session = None
    try:
        fresh = not (out / "config.yaml").exists()
    except OSError as error:
        raise UserError(f"out={str(out)[:100]}: {error.strerror}") from error
    if fresh:
        set_threads(cfg["train"]["threads"], None)
        session = Session(cfg, these, {})  # all that can be wrong comes up before a folder is made
    rundir = RunDir.open(out, {**cfg, "out": str(out)}, ignore=SAME_RUN, steps_may_grow=grows)
    stop = Stop()
    try:
        if rundir.state == "done":
            these.from_leader(None)
            return finished(rundir)
        with stop.listening():
            if session is None:
                set_threads(cfg["train"]["threads"], rundir.info().get("threads"))
                session = Session(cfg, these, rundir.info())
            recorded = Recorded(session, rundir, choices)
            final = recorded.run(stop, at_end)
    finally:
        rundir.close()
    if stop.signum is not None and rundir.info().get("status") == "interrupted":
        name = signal.Signals(stop.signum).name
        print(
            f"{name} after step {recorded.progress.step}; the same command with out={out} goes on",
            file=sys.stderr,
        )
        raise SystemExit(128 + stop.signum)
    return final


def follow(cfg: Mapping[str, Any], these: Processes) -> Row:
    """The other processes of a run: they compute as the first one does, and record nothing."""
    start = these.from_leader(None)
    if start is None:
        return {}
    set_threads(cfg["train"]["threads"], start["info"]["threads"])
    session, stop = Session(cfg, these, start["info"]), Stop()
    session.measure_kernels(start["info"]["kernels"])
    progress = session.begin(start["checkpoint"])
    silent = {
        "evaluate": lambda step: session.validation(),
        "observe": lambda step: {},
        "on_gradients": lambda step: None,
        "log": lambda row: None,
        "save": lambda progress, last: None,
    }
    with stop.listening():
        train(session.train, session.hooks(stop=stop, **silent), progress=progress, **session.trained())
    return session.test() if session.data.n_test and stop.signum is None else {}


def finished(rundir: RunDir) -> Row:
    """What a run that is over gave; Diverged again where it diverged."""
    info = rundir.info()
    if info["status"] == "diverged":
        raise Diverged(
            f"{rundir.path} diverged before ({info.get('diverged')}); another out=... starts a new run"
        )
    print(f"{rundir.path} is done already; nothing to do. Another out=... starts a new run.")
    return info.get("final", {})
