"""Hydra's other launchers (joblib, submitit_local, submitit_slurm, basic): they say where a job runs; it is
`python train.py` in a process of its own there too, so that none hurts another, nor the launcher's workers.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from hydra_plugins.ffnlab_sweep import _start
from hydra_plugins.ffnlab_sweep._view import View, finished, status

POLL_S = 0.5


class JobProcess:
    """The task that a launcher carries to its workers: starts the job, and waits for it."""

    def __init__(self, train: str, arguments: Sequence[str]):
        self.train, self.arguments = train, list(arguments)

    def __call__(self, cfg: Any) -> None:
        """Run one job to its end; raises RuntimeError with the reason when it does not come to one."""
        hydra = HydraConfig.get()
        overrides = list(hydra.overrides.task)
        job = _start.start(
            self.train, [*self.arguments, *overrides], _start.folder(overrides), int(hydra.job.num)
        )
        with Warned(job) as warned:
            try:
                code = job.wait()
            except BaseException:  # this worker is stopped
                if (
                    sys.platform != "linux"
                ):  # there SIGTERM comes when it ends; a second one would not let it save
                    job.terminate()
                raise
        if warned.signum is not None:
            signal.raise_signal(warned.signum)  # the scheduler's own handler: it queues the job again
        if problem := _start.verdict(code):
            raise RuntimeError(problem)


class Warned(AbstractContextManager["Warned"]):
    """Inside, the signal by which a scheduler says that time is up lets the job save its state and end."""

    def __init__(self, job: subprocess.Popen[bytes]):
        self.job = job
        self.signum: int | None = None
        self.before: Any = None

    def __enter__(self) -> "Warned":
        listening = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGUSR2")
        if listening and callable(signal.getsignal(signal.SIGUSR2)):
            self.before = signal.signal(signal.SIGUSR2, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGUSR2, self.before)

    def _pass_on(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:  # a second SIGTERM would not let it save
            self.job.send_signal(signal.SIGTERM)
        self.signum = signum


class OtherLauncher:
    """Gives a launcher each job's share of the cores, shows the jobs meanwhile, and reports their ends."""

    def __init__(self, launcher: Launcher, config: DictConfig):
        self.launcher, self.settings = launcher, config.hydra.launcher
        self.earlier: list[Path] = []  # finished before, for the view
        self.name = str(config.hydra.runtime.choices["hydra/launcher"])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; one JobReturn each. A launcher that gives up (its worker was killed, a job was taken
        out of the queue) leaves the jobs that are not finished as failed.
        """
        share = self.share(len(job_overrides))
        jobs = [[*overrides, *_start.threads(overrides, share)] for overrides in job_overrides]
        outs = [_start.folder(overrides) for overrides in job_overrides]
        with Watch(outs, self.earlier) as watch:
            try:
                returns = self.launcher.launch(jobs, initial_job_idx)
            except Exception as error:
                why = f"{self.name} gave up: {' '.join(str(error).split())[:160] or type(error).__name__}"
                returns = [_start.ended(None if finished(out) else why) for out in outs]
            for out, ret in zip(outs, returns, strict=True):
                watch.over(out, None if ret.status == JobStatus.COMPLETED else str(ret._return_value))
        return returns

    def share(self, jobs: int) -> int:
        """Threads of a job: what the scheduler gives it, else the cores over the jobs that run at once."""
        if given := self.settings.get("cpus_per_task"):
            return int(given)
        if self.name == "submitit_slurm":
            return 1  # as SLURM does
        cores, at_once = _start.cores(), int(self.settings.get("n_jobs", 1 if self.name == "basic" else jobs))
        return cores // min(jobs, at_once if at_once > 0 else max(1, cores + 1 + at_once))


class Watch(AbstractContextManager["Watch"]):
    """Shows jobs that others run, by what their run directories say, until it is left."""

    def __init__(self, outs: Sequence[Path], earlier: Sequence[Path]):
        self.waiting, self.running = list(outs), dict[Path, float]()
        self.view = View(len(outs), earlier)
        self.left, self.lock = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self.view.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self.thread.join()
        self.view.__exit__()

    def over(self, out: Path, problem: str | None) -> None:
        """Say how a job ended, unless that was seen already."""
        with self.lock:
            self._end(out, problem)

    def _look(self) -> None:
        while not self.left.wait(POLL_S):
            with self.lock:
                for out in [*self.waiting, *self.running]:
                    word = status(out)
                    if word == "running":
                        self._begin(out)
                    elif finished(out):
                        self._end(out, None)
                    elif (
                        word == "failed" and out in self.running
                    ):  # not "interrupted": it may be queued again
                        self._end(out, word)
                self.view.tick([(out, time.monotonic() - since) for out, since in self.running.items()])

    def _begin(self, out: Path) -> None:
        if out in self.waiting:
            self.waiting.remove(out)
            self.running[out] = time.monotonic()
            self.view.started(out)

    def _end(self, out: Path, problem: str | None) -> None:
        self._begin(out)
        if out in self.running:
            seconds = time.monotonic() - self.running.pop(out)
            self.view.ended(out, seconds, problem, _start.log_of(out))
