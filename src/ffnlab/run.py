"""One run: its directory, its resume, its loop, its status."""

import contextlib
import dataclasses
import math
import signal
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ffnlab.data import cache_dir
from ffnlab.device import DTYPES, instruction_set, set_threads
from ffnlab.facts import closing, facts
from ffnlab.nn.count import TRAINING, count, total
from ffnlab.nn.rate import cached as matrix_rate
from ffnlab.nn.threshold import calibrate
from ffnlab.probe import Observation
from ffnlab.record.checkpoint import load, newest_complete, save, save_weights
from ffnlab.record.console import ConsoleSink
from ffnlab.record.metrics import Metrics
from ffnlab.record.neurons import NeuronRecord
from ffnlab.record.rundir import RunDir, new_name, write_atomic
from ffnlab.record.sinks import Sinks
from ffnlab.session import Session
from ffnlab.train import Diverged, Hooks, Progress, Row, train
from ffnlab.validate import validate

SAME_RUN = {
    "out",
    "logger",
    "study",
    "arm",
    "checkpoint.keep_last",
}  # keys that may differ when a run is resumed


def run(
    cfg: Mapping[str, Any], choices: Mapping[str, Any], at_end: Callable[[Path], list[Path]] | None = None
) -> Row:
    """Train what a plain configuration says, in its run directory; returns the final metrics.

    A finished run is not run again. Raises UserError for wrong input, Diverged for a non-finite loss, and
    SystemExit(130 or 143) after a signal, when everything is saved.
    """
    validate(cfg)
    out = Path(cfg["out"] or Path("outputs") / new_name(choices["ffn"], choices["act"], cfg["seed"]))
    session = None
    if not (out / "config.yaml").exists():
        session = Session(cfg)  # all that can be wrong comes up before a folder is made
    grows = choices.get("schedule") == "constant"
    rundir = RunDir.open(out, {**cfg, "out": str(out)}, ignore=SAME_RUN, steps_may_grow=grows)
    try:
        if rundir.state == "done":
            return finished(rundir)
        session = session or Session(cfg)
        return Recorded(session, rundir, choices).run(at_end)
    finally:
        rundir.close()


def finished(rundir: RunDir) -> Row:
    """What a run that is over gave; Diverged again where it diverged."""
    info = rundir.info()
    if info["status"] == "diverged":
        raise Diverged(
            f"{rundir.path} diverged before ({info.get('diverged')}); another out=... starts a new run"
        )
    print(f"{rundir.path} is done already; nothing to do. Another out=... starts a new run.")
    return info.get("final", {})


class Recorded:
    """A session that writes its record into a run directory."""

    def __init__(self, session: Session, rundir: RunDir, choices: Mapping[str, Any]):
        self.session, self.rundir = session, rundir
        self.metrics = Metrics(rundir.path / "metrics.jsonl")
        self.neurons = NeuronRecord(rundir.path / "neurons.zarr", session.probe.budget_gib)
        self.sinks = Sinks([ConsoleSink(), session.sink])
        self.signum: int | None = None
        self.last: Row = {}
        before = rundir.info()
        self.probe_s_before = before.get("timings", {}).get("probe_s", 0.0)
        threads = set_threads(session.train.threads, before.get("threads"))
        if before.get("instruction_set", instruction_set()) != instruction_set():
            warnings.warn(
                f"resumed on {instruction_set()} instead of {before['instruction_set']}: not bit-exact",
                stacklevel=2,
            )
        self.flops = total(count(session.model, session.data.seq_len).values()).flops_per_token
        self.rate = matrix_rate(cache_dir(), session.device, DTYPES[session.precision])
        rundir.update(**facts(session, choices, threads, self.flops, self.rate))
        if session.data.tokenizer is not None:
            session.data.tokenizer.save(rundir.path / "tokenizer.json")

    def run(self, at_end: Callable[[Path], list[Path]] | None) -> Row:
        """Resume or start, train, and write the end."""
        s = self.session
        progress = self.begin()
        self.sinks.start(
            {**self.rundir.info(), "path": str(self.rundir.path), "resumed": progress.step > 0}, dict(s.cfg)
        )
        hooks = Hooks(
            batches=s.batches,
            schedule=s.schedule,
            precision=s.autocast,
            begin=s.begin,
            evaluate=self.evaluate,
            observe=self.observe,
            on_gradients=lambda step: None,
            log=self.log,
            save=self.save,
            save_due=lambda step: step % s.checkpoint.every == 0,
            stop=lambda: self.signum is not None,
        )
        status = "failed"
        try:
            with self.signals():
                train(
                    s.train, hooks, loss=s.loss, parameters=list(s.model.parameters()), optimizer=s.optimizer,
                    scaler=s.scaler, seed=s.cfg["seed"], progress=progress,
                )  # fmt: skip
            status = "interrupted" if self.signum is not None else "done"
            if status == "done" and s.data.n_test:
                self.log({**dataclasses.asdict(progress), **s.test()})
        except Diverged as error:
            status = "diverged"
            self.rundir.update(diverged=str(error))
            raise
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except Exception:
            write_atomic(self.rundir.path / "error.txt", traceback.format_exc())
            raise
        finally:
            self.end(status, progress, at_end)
        if self.signum is not None:
            name, out = signal.Signals(self.signum).name, self.rundir.path
            print(
                f"{name} after step {progress.step}; the same command with out={out} goes on", file=sys.stderr
            )
            raise SystemExit(128 + self.signum)
        return self.last

    def begin(self) -> Progress:
        """The newest complete checkpoint, or a fresh start; the record is cut back to it."""
        found = newest_complete(self.rundir.path)
        progress = self.session.restore(*load(found)) if found else Progress()
        if found is None:
            windows, _ = self.session.data.probe_tokens(self.session.probe.tokens)
            calibrate(self.session.model, windows.to(self.session.device))
        keep = progress.step if found else -1
        self.metrics.truncate(keep)
        self.neurons.truncate(keep)
        return progress

    def evaluate(self, step: int) -> Row:
        """Validation loss and the scan."""
        return self.session.validation() | self.record(step, self.session.observer.scan(step))

    def observe(self, step: int) -> Row:
        """What the probes see after update `step`, where one is due; saves the weights where that is asked."""
        each, observer = self.session.checkpoint.weights_every, self.session.observer
        if each is not None and step % each == 0:
            save_weights(self.rundir.path, step, self.session.model.state_dict())
        return self.record(step, observer.observe(step)) if observer.due(step) else {}

    def record(self, step: int, seen: Observation) -> Row:
        """Arrays to neurons.zarr, histograms to the sinks; the scalars go into the row."""
        for name, (array, dims) in seen.arrays.items():
            self.neurons.add(step, name, array, dims)
        if seen.histograms:
            self.sinks.histograms(step, seen.histograms)
        return seen.scalars

    def log(self, row: Row) -> None:
        """One row of the record and its copies."""
        if "perf/tok_per_s" in row:
            row["perf/mfu"] = TRAINING * self.flops * row["perf/tok_per_s"] / self.rate
        self.metrics.append(row)
        self.sinks.log(row)
        self.last = {**self.last, **row}

    def save(self, progress: Progress) -> None:
        """The record first, then the checkpoint that relies on it."""
        s, step = self.session, progress.step
        self.metrics.sync()
        self.neurons.flush()
        try:
            save(self.rundir.path, step, s.model.state_dict(), s.state(progress), s.checkpoint.keep_last)
        except FloatingPointError as error:
            raise Diverged(f"step {step}: {error}") from error

    def end(self, status: str, progress: Progress, at_end: Callable[[Path], list[Path]] | None) -> None:
        """Status, final metrics and copies, however the loop ended."""
        self.metrics.close()
        cost = self.session.observer.seconds
        pace = [row["perf/tok_per_s"] for row in self.metrics.read() if "perf/tok_per_s" in row]
        timings = {
            "total_s": progress.time_s,
            "probe_s": self.probe_s_before + cost,
            "median_tok_per_s": statistics.median(pace) if pace else 0.0,
        }
        self.rundir.update(status=status, final=self.last, timings=timings)
        self.neurons.flush()  # after the status: a full disk must not hide how the run ended
        if status == "done" and at_end is not None:
            for picture in at_end(self.rundir.path):
                self.sinks.image(picture.stem, picture, progress.step)
        self.sinks.finish(status, {k: v for k, v in self.last.items() if math.isfinite(v)})
        if status == "done":
            print("\n".join(closing(self.rundir.info(), self.last, self.rundir.path)))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop at the next step boundary; a second one stops at once."""

        def on_signal(signum: int, frame: Any) -> None:
            if self.signum is not None:
                raise SystemExit(128 + signum)
            self.signum = signum

        before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
