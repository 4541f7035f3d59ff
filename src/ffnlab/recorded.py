"""A session that writes its record into a run directory: the course of one run, from its start to its end."""

import json
import math
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ffnlab.cache import cache_dir
from ffnlab.device import DTYPES
from ffnlab.ending import AtEnd, ceiling, complaints, in_time, quietly, timings
from ffnlab.errors import UserError
from ffnlab.facts import check_same_run, closing, facts, opening, token_texts
from ffnlab.nn.count import TRAINING, count, total
from ffnlab.nn.rate import cached
from ffnlab.probe import Observation
from ffnlab.record.checkpoint import resumable, save, save_weights
from ffnlab.record.console import ConsoleSink
from ffnlab.record.files import free_bytes, full_disk
from ffnlab.record.metrics import Metrics
from ffnlab.record.neurons import NeuronRecord
from ffnlab.record.rundir import RunDir, write_atomic
from ffnlab.record.sinks import Sinks
from ffnlab.session import Session
from ffnlab.stop import Stop, Stopped
from ffnlab.train import Diverged, Progress, Rewind, Row, train
from ffnlab.trouble import diagnose, finite, spike
from ffnlab.withheld import masked


class Recorded:
    """What the process that leads a run adds to the loop."""

    def __init__(self, session: Session, rundir: RunDir, choices: Mapping[str, Any], stop: Stop):
        self.session, self.rundir, self.choices, self.stop = session, rundir, choices, stop
        self.metrics = Metrics(rundir.path / "metrics.jsonl")
        self.neurons = NeuronRecord(rundir.path / "neurons.zarr", session.probe.budget_gib)
        self.sinks = Sinks([ConsoleSink(), session.sink])
        self.progress, self.last = Progress(), Row()
        self.flops = total(count(session.model, session.data.seq_len).values()).flops_per_token
        self.rate = cached(cache_dir(), session.device, DTYPES[session.precision])
        timings = rundir.info().get("timings", {})
        self.probe_s_before: dict[str, float] = timings.get("probes", {})

    def run(self, at_end: AtEnd | None) -> Row:
        """Resume or start, train, and write the end, however it comes."""
        status = "failed"
        try:
            self.begin()
            status = "done" if self.course() else "interrupted"
        except Diverged as error:
            status = "diverged"
            self.rundir.update(diverged=str(error))
            raise
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except UserError:
            raise
        except Exception:
            quietly(write_atomic, self.rundir.path / "error.txt", masked(traceback.format_exc()))
            raise
        finally:
            self.end(status, at_end)
        return self.last

    def course(self) -> bool:
        """All updates, and the test when they are done; whether the run came to its end."""
        s, stop = self.session, self.stop
        calls = {
            "evaluate": self.evaluate,
            "observe": self.observe,
            "on_gradients": s.observer.on_gradients,
            "log": self.log,
            "save": self.save,
            "diagnose": lambda step, micro, what: diagnose(s, self.rundir.path, step, micro, what, self.last),
            "on_spike": lambda row: spike(s, self.rundir, self.progress, row),
        }
        while not self.reached():
            try:
                train(s.train, s.hooks(stop=stop, **calls), progress=self.progress, **s.trained())
                break
            except Rewind as back:
                self.progress = s.rewound(back, self.progress)
                self.cut(resumed=True)
        p = self.progress
        over = self.reached() or (p.step == s.train.steps and p.pending is None)
        if not s.data.n_test:
            return over
        if s.stopped(stop):
            return False
        tested = s.test(stop)
        if s.stopped(stop):
            return False  # not all of the split was seen
        self.log({"step": p.step, "tokens": p.tokens, "time_s": p.time_s, **tested})
        return over

    def begin(self) -> None:
        """The newest complete checkpoint, or a fresh start; the record is cut back to it, and the copies
        start.
        """
        s, before = self.session, self.rundir.info()
        check_same_run(s, before)
        self.rundir.update(**facts(s, self.choices, torch.get_num_threads(), self.flops, self.rate))
        self.rundir.update(kernels=s.measure_kernels(before.get("kernels")))
        if s.data.tokenizer is not None:
            s.data.tokenizer.save(self.rundir.path / "tokenizer.json")
        found = self.start()
        for name, (array, dims) in s.observer.fixed().items():
            self.neurons.fix(name, array, dims)
        if texts := token_texts(s):
            write_atomic(self.rundir.path / "tokens.json", json.dumps(texts))
        if found is None and s.checkpoint.weights_every is not None:
            save_weights(self.rundir.path, 0, s.model.state_dict())
        info = {**self.rundir.info(), "path": str(self.rundir.path), "resumed": found is not None}
        for line in opening(s):
            print(line, flush=True)
        self.sinks.start(info, dict(s.cfg))

    def start(self) -> Path | None:
        """Go on from the newest complete checkpoint, or begin; never from step 0 where there was one, and not
        unsaid where there was none.
        """
        s, folder = self.session, self.rundir.path / "checkpoints"
        found = resumable(self.rundir.path)
        least = 2 * sum(p.nbytes for p in s.model.parameters())  # of a checkpoint: one moment, or two
        if free_bytes(folder) < least:
            raise full_disk(folder, least)
        (self.rundir.path / "error.txt").unlink(missing_ok=True)  # of a session before this one
        if found is None and (rows := self.metrics.read()):
            warnings.warn(
                f"{self.rundir.path} holds no checkpoint yet: begins again at step 0, its record up to step "
                f"{rows[-1]['step']} is dropped",
                stacklevel=2,
            )
        self.progress = s.begin(found)
        self.cut(resumed=found is not None)
        over = self.reached()
        s.processes.from_leader({"checkpoint": found, "info": self.rundir.info(), "over": over})
        return found

    def cut(self, resumed: bool) -> None:
        """The record up to where the run goes on; a warning where it does not reach that far, a UserError
        where it is damaged.
        """
        step = self.progress.step if resumed else -1
        kept = {self.metrics.path: True, self.neurons.path: bool(self.session.observer.probes)}
        for part, expected in kept.items() if resumed else ():
            if expected and not part.exists():
                warnings.warn(f"{part} is missing: the record begins after step {step}", stacklevel=2)
        self.metrics.truncate(step if self.progress.pending is None else step - 1)
        self.last = Row()
        for row in self.metrics.read():
            self.last |= row
        try:
            self.neurons.truncate(step)
            self.neurons.restore(self.session.recorded)
        except UserError:
            raise
        except Exception as error:
            path = self.neurons.path
            raise UserError(
                f"{path} is damaged ({error}): move it away to go on without the record so far"
            ) from error

    def reached(self) -> bool:
        """Whether the run was stopped by its target loss before."""
        target = self.session.train.target_loss
        return target is not None and self.progress.step > 0 and self.last.get("val/loss", math.inf) <= target

    def evaluate(self, step: int) -> Row:
        """Validation loss and the scan; nothing where a stop cut them off."""
        row = self.session.validation(self.stop)
        try:
            return row | self.record(step, self.session.observer.scan(step, self.stop.check))
        except Stopped:
            return Row()

    def observe(self, step: int) -> Row:
        """What the probes see after update `step`, where one is due."""
        observer = self.session.observer
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
            row["perf/mfu"] = (
                TRAINING * self.flops * row["perf/tok_per_s"] / (self.rate * self.session.processes.size)
            )
        if self.session.kernels.mode != "dense":
            row["perf/sparse_frac"] = self.session.kernels.share()
        self.metrics.append(row)
        self.sinks.log(row)
        self.last = {**self.last, **row}

    def save(self, progress: Progress, last: bool) -> None:
        """The weights and the whole, each where it is due; the record first, then the checkpoint that relies
        on it.
        """
        s, step = self.session, progress.step
        each = s.checkpoint.weights_every
        if each is not None and step % each == 0:
            save_weights(self.rundir.path, step, s.model.state_dict())
        if not last and step % s.checkpoint.every:
            return
        if not (self.rundir.path / "config.yaml").exists():
            raise UserError(
                f"{self.rundir.path} was removed or emptied while its run went on: nothing can be saved"
            )
        self.metrics.sync()
        self.neurons.flush()
        try:
            state = s.state(progress) | {"record": self.neurons.state()}
            save(self.rundir.path, step, s.model.state_dict(), state, s.checkpoint.keep_last)
        except FloatingPointError as error:
            raise Diverged(f"step {step}: {error}") from error

    def end(self, status: str, at_end: AtEnd | None) -> None:
        """The status first; what may fail after it gets a warning and hides neither it nor an error on its
        way.
        """
        skips = {"skips": self.progress.skips} if self.progress.skips else {}
        quietly(self.rundir.update, status=status, final=self.last, **skips)
        quietly(self.neurons.flush)
        rows, s = quietly(self.metrics.read) or [], self.session
        quietly(self.rundir.update, timings=timings(s, rows, self.progress.time_s, self.probe_s_before))
        self.metrics.close()
        wrong = complaints(rows) if status == "done" else []
        if status == "done":
            quietly(self.rundir.update, matrix_rate_flops_per_s=ceiling(s), warnings=wrong)
        if status == "done" and at_end is not None:
            for picture in in_time(at_end, self.rundir.path, self.stop):
                self.sinks.image(picture.stem, picture, self.progress.step)
        self.sinks.finish(status, finite(self.last))
        if status == "done":
            print("\n".join(closing(self.rundir.info(), self.last, self.rundir.path)), flush=True)
        for line in wrong:
            warnings.warn(line, stacklevel=2)
