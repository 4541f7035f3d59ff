"""One run: its directory, its lock, its processes."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ffnlab.device import set_threads
from ffnlab.ending import AtEnd
from ffnlab.errors import UserError
from ffnlab.processes import Processes, processes
from ffnlab.record.rundir import RunDir, new_name
from ffnlab.recorded import Recorded
from ffnlab.session import Session
from ffnlab.stop import Stop
from ffnlab.train import Diverged, Rewind, Row, train
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
        recorded = prepared(cfg, choices, these, session, rundir, stop)
        with stop.listening():
            final = recorded.run(at_end)
    finally:
        rundir.close()
    if stop.signum is not None:
        done = rundir.info().get("status") == "done"
        then = f"the run is done: {out}" if done else f"the same command with out={out} goes on"
        step = recorded.progress.step
        print(f"{signal.Signals(stop.signum).name} after step {step}; {then}", file=sys.stderr)
        raise SystemExit(128 + stop.signum)
    return final


def prepared(
    cfg: Mapping[str, Any],
    choices: Mapping[str, Any],
    these: Processes,
    session: Session | None,
    rundir: RunDir,
    stop: Stop,
) -> Recorded:
    """The parts of a run that is resumed are built now; what goes wrong meanwhile is its status."""
    status = "failed"
    try:
        if session is None:
            set_threads(cfg["train"]["threads"], rundir.info().get("threads"))
            session = Session(cfg, these, rundir.info())
        return Recorded(session, rundir, choices, stop)
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    finally:
        if sys.exception() is not None:
            rundir.set_status(status)


def follow(cfg: Mapping[str, Any], these: Processes) -> Row:
    """The other processes of a run: they compute as the first one does, and record nothing."""
    start = these.from_leader(None)
    if start is None:
        return {}
    set_threads(cfg["train"]["threads"], start["info"]["threads"])
    session, stop = Session(cfg, these, start["info"]), Stop()
    session.measure_kernels(start["info"]["kernels"])
    progress, over = session.begin(start["checkpoint"]), start["over"]
    silent = {
        "evaluate": lambda step: session.validation(stop),
        "observe": lambda step: {},
        "on_gradients": lambda step: None,
        "log": lambda row: None,
        "save": lambda progress, last: None,
        "diagnose": lambda step, micro, what: str(these.gather(session.diagnosis(step, micro))),
        "on_spike": lambda row: these.from_leader(None),
    }
    hooks = session.hooks(stop=stop, **silent)
    with stop.listening():
        while not over:
            try:
                train(session.train, hooks, progress=progress, **session.trained())
                over = True
            except Rewind as back:
                progress = session.rewound(back, progress)
        if session.data.n_test and not session.stopped(stop):
            session.test(stop)
            session.stopped(stop)  # the leader asks, too
    return {}


def finished(rundir: RunDir) -> Row:
    """What a run that is over gave; Diverged again where it diverged."""
    info = rundir.info()
    if info["status"] == "diverged":
        raise Diverged(
            f"{rundir.path} diverged before ({info.get('diverged')}); another out=... starts a new run"
        )
    print(f"{rundir.path} is done already; nothing to do. Another out=... starts a new run.")
    return info.get("final", {})
