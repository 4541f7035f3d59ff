"""Hydra's other launchers: whichever runs the jobs, each is a process of its own; none can end the sweep."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from ffnlab import explain
from hydra_plugins.ffnlab_sweep import _start
from hydra_plugins.ffnlab_sweep._others import JobProcess, OtherLauncher
from hydra_plugins.ffnlab_sweep._view import status

# Stands in for train.py and misbehaves.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
given = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:] if "=" in a)
out, do = Path(given["out"].strip("'")), given["do"]
out.mkdir(parents=True, exist_ok=True)
def end(status, code):
    info = {"status": status, "argv": sys.argv[1:], "pid": os.getpid(), "job": os.environ["FFNLAB_JOB"]}
    (out / "run.json").write_text(json.dumps(info))
    sys.exit(code)
if do == "exit": sys.exit(7)
if do == "kill": os.kill(os.getpid(), signal.SIGKILL)
if do == "diverge": end("diverged", 3)
if do == "ok": end("done", 0)
signal.signal(signal.SIGTERM, lambda *_: end("interrupted", 143))
(out / "run.json").write_text('{"status": "running"}')
time.sleep(60)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fake.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(root: Path, dos: Sequence[str], *hydra: str) -> tuple[list[Path], list[str]]:
    """The jobs' folders, and how Hydra's launcher says that they ended."""
    loader = explain.config_loader(root / "configs")
    settings = [*hydra, "hydra.sweep.dir=outputs", "hydra.mode=MULTIRUN"]
    config = loader.load_configuration("train", settings, RunMode.MULTIRUN)
    HydraConfig.instance().set_config(config)
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(loader, Callbacks()),
        task_function=JobProcess(os.path.abspath("fake.py"), _start.arguments(config)),
        config=config,
    )
    outs = [Path("outputs/x") / f"{i}-{do}" for i, do in enumerate(dos)]
    jobs = [[f"+do={do}", f"out='{out}'"] for do, out in zip(dos, outs, strict=True)]
    returns = OtherLauncher(launcher, config).launch(jobs, 0)
    return outs, [str(r._return_value) if r.status == JobStatus.FAILED else "ok" for r in returns]


def needs(launcher: str) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")


def test_no_job_can_end_the_sweep(here: Path, root: Path, capsys: pytest.CaptureFixture[str]):
    outs, ended = launch(root, ["exit", "kill", "diverge", "ok"], "hydra/launcher=basic")
    assert ended == ["exit code 7", "killed by SIGKILL (out of memory?)", "ok", "ok"]
    info = json.loads((outs[3] / "run.json").read_text())
    assert info["argv"][-4:] == [
        "+do=ok",
        f"out='{outs[3]}'",
        f"train.threads={_start.cores()}",
        "hydra.mode=RUN",
    ]
    assert info["job"] == "3"
    shown = capsys.readouterr().out
    assert "[4/4] start  3-ok" in shown
    assert "FAILED 0-exit: exit code 7; log: outputs/x/0-exit.log" in shown
    assert "diverged 2-diverge" in shown
    assert sorted(path.name for path in here.iterdir()) == ["fake.py", "outputs"]


def test_reused_workers_of_joblib_run_each_job_in_a_process_of_its_own(here: Path, root: Path):
    needs("joblib")
    outs, ended = launch(root, ["ok", "kill", "ok"], "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    assert ended == ["ok", "killed by SIGKILL (out of memory?)", "ok"]
    assert len({json.loads((outs[i] / "run.json").read_text())["pid"] for i in (0, 2)}) == 2


@pytest.mark.slow
def test_jobs_of_submitit_end_as_those_of_our_own(here: Path, root: Path):
    needs("submitit")
    outs, ended = launch(root, ["ok", "exit", "kill"], "hydra/launcher=submitit_local")
    assert ended == ["ok", "exit code 7", "killed by SIGKILL (out of memory?)"]
    assert status(outs[0]) == "done"
    assert list((here / "outputs/.submitit").glob("*/*_log.out"))


TINY = ["model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.seq_len=32", "train.steps=3"]
TINY += ["data=counting", "tokenizer=byte", "logger=none"]


@pytest.mark.slow
def test_a_real_sweep_with_submitit_skips_what_is_done_and_says_what_failed(tmp_path: Path, root: Path):
    needs("submitit")
    command = [sys.executable, str(root / "train.py"), "-m", "ffn=mlp,swiglu", *TINY]
    command += ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]

    def sweep() -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(root / "src")}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    first = sweep()
    assert first.returncode == 0, first.stdout + first.stderr
    runs = sorted(path for path in (tmp_path / "outputs/sweep").iterdir() if path.is_dir())
    assert [(run.name[:-9], status(run)) for run in runs] == [("mlp-s0", "done"), ("swiglu-s0", "done")]
    assert [run.with_name(f"{run.name}.log").exists() for run in runs] == [True, True]
    runs[1].rename(tmp_path / "away")
    runs[1].write_text("a file where a run wants its folder")
    second = sweep()
    assert second.returncode == 1
    assert second.stdout.count("done (before)") == 1
    assert "failed: exit code 1" in second.stdout
    assert "is a file; a run needs a folder" in second.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "away"] == ["outputs"]


class GivesUp:
    """A launcher of which one job is done when a worker dies."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        out = _start.folder(job_overrides[0])
        out.mkdir(parents=True)
        (out / "run.json").write_text('{"status": "done"}')
        raise RuntimeError("the job was\ncancelled")


def test_a_launcher_that_gives_up_leaves_what_is_done(here: Path, capsys: pytest.CaptureFixture[str]):
    node = {"launcher": {"n_jobs": 2}, "runtime": {"choices": {"hydra/launcher": "joblib"}}}
    config = OmegaConf.create({"hydra": node})
    launcher = OtherLauncher(GivesUp(), config)  # type: ignore[arg-type]
    returns = launcher.launch([["out='outputs/x/a'"], ["out='outputs/x/b'"]], 0)
    assert [r.status for r in returns] == [JobStatus.COMPLETED, JobStatus.FAILED]
    assert str(returns[1]._return_value) == "joblib gave up: the job was cancelled"


@pytest.mark.parametrize(
    ("name", "settings", "jobs", "threads"),
    [
        ("joblib", {"n_jobs": -1}, 100, 1),
        ("joblib", {"n_jobs": 2}, 100, 4),
        ("joblib", {"n_jobs": 4}, 2, 4),  # no more run than there are
        ("joblib", {"n_jobs": -2}, 100, 1),  # all cores but one
        ("submitit_local", {"cpus_per_task": None}, 2, 4),
        ("submitit_slurm", {"cpus_per_task": None}, 2, 1),
        ("submitit_slurm", {"cpus_per_task": 6}, 2, 6),
        ("basic", {}, 3, 8),
    ],
)
def test_a_job_gets_its_share_of_eight_cores(
    name: str, settings: dict, jobs: int, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_start, "cores", lambda: 8)
    node = {"launcher": settings, "runtime": {"choices": {"hydra/launcher": name}}}
    launcher = OtherLauncher(GivesUp(), OmegaConf.create({"hydra": node}))  # type: ignore[arg-type]
    assert launcher.share(jobs) == threads


WORKER = """
import signal, sys
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from hydra_plugins.ffnlab_sweep import _others
def queue_again(signum, frame):
    print("queued again", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR2, queue_again)  # as submitit does
node = {"overrides": {"task": ["+do=wait", "out='outputs/x/0'"]}, "job": {"num": 0}}
_others.HydraConfig.get = lambda: OmegaConf.create(node)
_others.JobProcess("fake.py", [])(None)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="a signal of POSIX")
def test_when_time_is_up_a_job_saves_before_it_is_queued_again(here: Path, root: Path):
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], env=env, stdout=subprocess.PIPE, text=True)
    out = here / "outputs/x/0"
    until = time.monotonic() + 30
    while status(out) != "running" and time.monotonic() < until:
        time.sleep(0.05)
    worker.send_signal(signal.SIGUSR2)
    said, _ = worker.communicate(timeout=30)
    assert said == "queued again\n"
    assert status(out) == "interrupted"


def test_a_launcher_that_is_not_installed_is_named_with_its_extra(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    loader = explain.config_loader(root / "configs")
    monkeypatch.setattr(explain.Tree, "options", lambda self, group: ["basic", "process"])
    (problem,) = explain.explain(["hydra/launcher=submitit_slurm"], loader, lambda cfg: None)
    assert problem.endswith("needs a plugin: pip install -e '.[slurm]'")
