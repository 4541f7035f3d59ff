"""Launcher `process`: every job is `python train.py ...` in its own process, so that none hurts another.

Hydra finds it in `arms`. A module of plugins without the underscore it would execute once more after `arms`
had imported it, and then hold another class of this name than `arms` does.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ffnlab.errors import UserError
from hydra_plugins.ffnlab_sweep import _start
from hydra_plugins.ffnlab_sweep._view import View

POLL_S = 0.1


@dataclass
class ProcessConf:
    """Settings under `hydra.launcher`."""

    _target_: str = "hydra_plugins.ffnlab_sweep._process.ProcessLauncher"
    parallel: int = 1  # jobs at the same time; each gets cores // parallel threads
    timeout_s: float | None = None  # a job that runs longer is stopped and counts as failed
    grace_s: float = 60.0  # what a stopped job may take to save its state before it is killed


ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessConf, provider="ffnlab")


@dataclass
class Child:
    """A running job."""

    index: int
    out: Path
    process: subprocess.Popen[bytes]
    start: float = field(default_factory=time.monotonic)
    deadline: float | None = None  # when it is killed
    reason: str | None = None  # why it was stopped

    def problem(self) -> str | None:
        """Of a job that is over: why it did not come to an end, None when it did."""
        problem = _start.verdict(self.process.returncode)
        return problem and (self.reason or problem)

    def send(self, signum: int) -> None:
        """A signal to the job and whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)


class ProcessLauncher(Launcher):
    """Runs jobs side by side; survives failing, exiting, hanging, killed and diverging ones.

    SIGINT and SIGTERM are passed on: no job is started any more, the running ones may save, and `stopped`
    holds the signal. A second one kills them.
    """

    def __init__(self, parallel: int, timeout_s: float | None, grace_s: float):
        self.parallel, self.timeout_s, self.grace_s = parallel, timeout_s, grace_s
        self.stopped: int | None = None
        self.children: list[Child] = []
        self.earlier: list[Path] = []  # finished before, for the view

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's hook: called once, before `launch`."""
        self.config = config
        if self.parallel < 1 or not self.grace_s >= 0 or not (self.timeout_s is None or self.timeout_s > 0):
            raise UserError(
                f"hydra.launcher: expected parallel >= 1, timeout_s > 0 or null, grace_s >= 0; "
                f"got {self.parallel}, {self.timeout_s}, {self.grace_s}"
            )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run all jobs; one JobReturn each, FAILED with the reason where a job did not come to an end."""
        returns = [_start.ended("not started") for _ in job_overrides]
        queue = list(enumerate(job_overrides))
        with Signals(self._stop), View(len(queue), self.earlier) as view:
            try:
                while self.children or (queue and self.stopped is None):
                    while queue and len(self.children) < self.parallel and self.stopped is None:
                        index, overrides = queue.pop(0)
                        out = _start.folder(overrides)
                        view.started(out)
                        try:
                            self.children.append(self._start(index, overrides))
                        except OSError as error:  # a full disk takes no log, a full machine no process
                            problem = f"cannot be started: {error}"
                            returns[index] = _start.ended(problem)
                            view.ended(out, 0.0, problem, _start.log_of(out))
                    for child in [c for c in self.children if self._over(c)]:
                        self.children.remove(child)
                        problem = child.problem()
                        returns[child.index] = _start.ended(problem)
                        view.ended(
                            child.out, time.monotonic() - child.start, problem, _start.log_of(child.out)
                        )
                    view.tick([(c.out, time.monotonic() - c.start) for c in self.children])
                    time.sleep(POLL_S)
            finally:  # an error of ours must not leave jobs behind
                for child in self.children:
                    child.send(signal.SIGKILL)
        return returns

    def _start(self, index: int, overrides: Sequence[str]) -> Child:
        threads = _start.threads(overrides, _start.cores() // self.parallel)
        words = [*_start.arguments(self.config), *overrides, *threads]
        out = _start.folder(overrides)
        return Child(index, out, _start.start(_start.script(), words, out, index))

    def _over(self, child: Child) -> bool:
        if child.process.poll() is not None:
            child.send(signal.SIGKILL)  # what it may have left behind in its session
            return True
        now = time.monotonic()
        if child.deadline is not None and now > child.deadline:
            child.reason = f"{child.reason}, killed after {self.grace_s:g} s of grace"
            child.deadline = None
            child.send(signal.SIGKILL)
        elif child.reason is None and self.timeout_s is not None and now - child.start > self.timeout_s:
            self._end(child, signal.SIGTERM, f"timeout after {self.timeout_s:g} s")
        elif child.reason is None and self.stopped is not None:  # the signal came while it was being started
            self._end(child, self.stopped, "interrupted")
        return False

    def _end(self, child: Child, signum: int, reason: str) -> None:
        child.reason, child.deadline = child.reason or reason, time.monotonic() + self.grace_s
        child.send(signum)

    def _stop(self, signum: int, _: FrameType | None) -> None:
        again = self.stopped is not None
        self.stopped = self.stopped or signum
        for child in self.children:
            self._end(child, signal.SIGKILL if again else signum, "interrupted")


class Signals(AbstractContextManager[None]):
    """SIGINT and SIGTERM go to `handler` inside; the old handlers come back after."""

    def __init__(self, handler: Any):
        self.handler = handler

    def __enter__(self) -> None:
        self.before = {s: signal.signal(s, self.handler) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)
