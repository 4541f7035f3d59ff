"""How a job is started and what its end means, whichever launcher runs it: `python train.py OVERRIDES`."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from ffnlab import foreign

COMPLETED = (0, 3)  # exit codes of train.py: done, diverged
SWEEP_ONLY = ("hydra.mode", "hydra.sweeper", "hydra/sweeper", "hydra.launcher", "hydra/launcher")
JOB_ENV = {"PYTHONUNBUFFERED": "1", "HYDRA_FULL_ERROR": "1"}  # logs are live, and hold the traceback of a bug


def script() -> str:
    """The path of the script that was started: train.py."""
    return os.path.abspath(sys.argv[0])


def arguments(config: DictConfig) -> list[str]:
    """What every job of a sweep is told about Hydra: where the configs are, and which one is read."""
    flags = {"main": "--config-path", "command-line": "--config-dir"}
    sources = [s for s in config.hydra.runtime.config_sources if s.provider in flags]
    folders = [word for s in sources for word in (flags[s.provider], s.path)]
    kept = [o for o in config.hydra.overrides.hydra if not o.lstrip("+~").startswith(SWEEP_ONLY)]
    return [*folders, "--config-name", str(config.hydra.job.config_name), *kept]


def folder(overrides: Sequence[str]) -> Path:
    """The run directory of a job."""
    return Path(next(o for o in reversed(overrides) if o.startswith("out=")).split("=", 1)[1].strip("'"))


def log_of(out: Path) -> Path:
    """What a job printed lies beside its folder, as the folder may not come to exist."""
    return out.with_name(f"{out.name}.log")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(overrides: Sequence[str], share: int) -> list[str]:
    """The override with a job's share of the cores; a resumed run keeps its number, as its results depend
    on it. None where it is given.
    """
    if any(o.startswith("train.threads=") for o in overrides):
        return []
    with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        stored = foreign.read_yaml(folder(overrides) / "config.yaml")
        return [f"train.threads={stored['train']['threads']}"]
    return [f"train.threads={max(1, share)}"]


def start(train: str, words: Sequence[str], out: Path, index: int) -> subprocess.Popen[bytes]:
    """The job as a process in a session of its own; its log is continued."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with log_of(out).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, train, *words, "hydra.mode=RUN"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **JOB_ENV, "FFNLAB_JOB": str(index)},
            start_new_session=True,  # a Ctrl-C reaches the sweep alone, which passes it on
            preexec_fn=before_the_job if sys.platform == "linux" else None,
        )


def before_the_job() -> None:
    """In the child, on Linux: SIGTERM when its parent is killed, so that no job trains on unseen; and SIGUSR2
    is ignored, which SLURM sends to every process of a job: the parent passes it on as SIGTERM.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def verdict(code: int) -> str | None:
    """Why a job with this exit code did not come to an end; None when it did."""
    if code in COMPLETED:
        return None
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (
            " (out of memory?)" if code == -signal.SIGKILL else ""
        )
    stopped = {128 + s: s.name for s in (signal.SIGINT, signal.SIGTERM)}
    return f"stopped by {stopped[code]}" if code in stopped else f"exit code {code}"


def ended(problem: str | None) -> JobReturn:
    """What Hydra calls a job that is over; of a failed one it says why."""
    if problem is None:
        return JobReturn(status=JobStatus.COMPLETED)
    ret = JobReturn(status=JobStatus.FAILED)
    ret.return_value = RuntimeError(problem)
    return ret
