"""A session that writes its record into a run directory: the course of one run, from its start to its end."""

import dataclasses
import json
import math
import statistics
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ffnlab.cache import cache_dir
from ffnlab.device import DTYPES
from ffnlab.errors import UserError
from ffnlab.facts import check_same_run, closing, facts, opening, token_texts
from ffnlab.nn.count import TRAINING, count, total
from ffnlab.nn.rate import cached, measure, remember
from ffnlab.probe import Observation
from ffnlab.record.checkpoint import newest_complete, save, save_weights
from ffnlab.record.console import ConsoleSink
from ffnlab.record.metrics import Metrics
from ffnlab.record.neurons import NeuronRecord
from ffnlab.record.rundir import RunDir, write_atomic
from ffnlab.record.sinks import Sinks
from ffnlab.session import Session
from ffnlab.stop import Stop
from ffnlab.train import Diverged, Progress, Row, train

AtEnd = Callable[[Path], list[Path]]
AT_END_S = 5.0  # patience with the figures at the end of a run


class Recorded:
    """What the process that leads a run adds to the loop."""

    def __init__(self, session: Session, rundir: RunDir, choices: Mapping[str, Any]):
        self.session, self.rundir, self.choices = session, rundir, choices
        self.metrics = Metrics(rundir.path / "metrics.jsonl")
        self.neurons = NeuronRecord(rundir.path / "neurons.zarr", session.probe.budget_gib)
        self.sinks = Sinks([ConsoleSink(), session.sink])
        self.progress, self.last = Progress(), Row()
        self.flops = total(count(session.model, session.data.seq_len).values()).flops_per_token
        self.rate = cached(cache_dir(), session.device, DTYPES[session.precision])
        timings = rundir.info().get("timings", {})
        self.probe_s_before: dict[str, float] = timings.get("probes", {})

    def run(self, stop: Stop, at_end: AtEnd | None) -> Row:
        """Resume or start, train, and write the end, however it comes."""
        s, status = self.session, "failed"
        try:
            self.begin()
            calls = {
                "evaluate": self.evaluate,
                "observe": self.observe,
                "on_gradients": s.observer.on_gradients,
                "log": self.log,
                "save": self.save,
            }
            if not self.reached():
                train(s.train, s.hooks(stop=stop, **calls), progress=self.progress, **s.trained())
            over = self.progress.step == s.train.steps or self.reached()
            status = "done" if over else "interrupted"
            if status == "done" and s.data.n_test:
                self.log({**dataclasses.asdict(self.progress), **s.test()})
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
            quietly(write_atomic, self.rundir.path / "error.txt", traceback.format_exc())
            raise
        finally:
            self.end(status, at_end)
        return self.last

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
        found = newest_complete(self.rundir.path)
        s.processes.from_leader({"checkpoint": found, "info": self.rundir.info()})
        self.progress = s.begin(found)
        self.cut(self.progress.step if found else -1)
        for name, (array, dims) in s.observer.fixed().items():
            self.neurons.fix(name, array, dims)
        if texts := token_texts(s):
            write_atomic(self.rundir.path / "tokens.json", json.dumps(texts))
        for row in self.metrics.read():
            self.last |= row
        if found is None and s.checkpoint.weights_every is not None:
            save_weights(self.rundir.path, 0, s.model.state_dict())
        info = {**self.rundir.info(), "path": str(self.rundir.path), "resumed": found is not None}
        for line in opening(s):
            print(line, flush=True)
        self.sinks.start(info, dict(s.cfg))

    def cut(self, step: int) -> None:
        """The record up to `step`; a warning where it does not reach that far, a UserError where it is
        damaged.
        """
        (self.rundir.path / "error.txt").unlink(missing_ok=True)  # of a session before this one
        if step >= 0:
            for part in (self.metrics.path, self.neurons.path):
                if not part.exists():
                    warnings.warn(f"{part} is missing: the record begins after step {step}", stacklevel=2)
        self.metrics.truncate(step)
        try:
            self.neurons.truncate(step)
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
        """Validation loss and the scan."""
        return self.session.validation() | self.record(step, self.session.observer.scan(step))

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
            save(self.rundir.path, step, s.model.state_dict(), s.state(progress), s.checkpoint.keep_last)
        except FloatingPointError as error:
            raise Diverged(f"step {step}: {error}") from error

    def end(self, status: str, at_end: AtEnd | None) -> None:
        """The status first; what may fail after it gets a warning and hides neither it nor an error on its
        way.
        """
        quietly(self.rundir.update, status=status, final=self.last)
        quietly(self.neurons.flush)
        quietly(self.rundir.update, timings=self.timings())
        self.metrics.close()
        if status == "done":
            quietly(self.rundir.update, matrix_rate_flops_per_s=self.ceiling())
        if status == "done" and at_end is not None:
            for picture in in_time(at_end, self.rundir.path):
                self.sinks.image(picture.stem, picture, self.progress.step)
        self.sinks.finish(status, {k: v for k, v in self.last.items() if math.isfinite(v)})
        if status == "done":
            print("\n".join(closing(self.rundir.info(), self.last, self.rundir.path)))

    def timings(self) -> dict[str, Any]:
        """Seconds of all sessions, those of the probes (scans included) together and one by one, the pace."""
        rows = quietly(self.metrics.read) or []
        pace = [row["perf/tok_per_s"] for row in rows if "perf/tok_per_s" in row]
        cost, before = self.session.observer.cost, self.probe_s_before
        probes = {name: before.get(name, 0.0) + seconds for name, seconds in cost.items()}
        return {
            "total_s": self.progress.time_s,
            "probe_s": sum(probes.values()),
            "probes": probes,
            "median_tok_per_s": statistics.median(pace) if pace else 0.0,
        }

    def ceiling(self) -> float:
        """The matrix-product rate, measured again: a machine busy at the start measured too little."""
        device, dtype = self.session.device, DTYPES[self.session.precision]
        return remember(cache_dir(), device, dtype, measure(device, dtype, budget_s=0.1))


def quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """call(...), an exception of it as a warning: for what must not hide how a run ended."""
    try:
        return call(*args, **options)
    except Exception as error:
        warnings.warn(f"at the end of the run: {type(error).__name__}: {error}", stacklevel=2)
        return None


def in_time(at_end: AtEnd, run: Path) -> list[Path]:
    """The pictures of `at_end`, or none when it fails or takes longer than AT_END_S."""
    pictures: list[Path] = []
    drawing = threading.Thread(target=lambda: pictures.extend(quietly(at_end, run) or []), daemon=True)
    drawing.start()
    drawing.join(AT_END_S)
    return list(pictures)
