"""Sweeps: which jobs a command line makes, where they go, and that nothing a job does can end the sweep."""

import errno
import io
import json
import math
import os
import re
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
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from ffnlab.errors import UserError
from ffnlab.explain import config_loader
from ffnlab.record.same import unequal
from hydra_plugins.ffnlab_sweep import _start, _view
from hydra_plugins.ffnlab_sweep._jobs import Job, digest, expand, slug
from hydra_plugins.ffnlab_sweep._process import ProcessLauncher
from hydra_plugins.ffnlab_sweep._tune import Tune
from hydra_plugins.ffnlab_sweep._view import clock, last_row, status
from hydra_plugins.ffnlab_sweep.arms import ArmsSweeper


def lines(command: Sequence[str], params: dict | None = None, arms: dict | None = None) -> list[str]:
    return [" ".join(job.overrides) for job in expand(command, params or {}, arms or {})]


# ---- expansion


def test_a_grid_in_the_order_in_which_it_was_typed():
    assert lines(["ffn=mlp,swiglu", "seed=0,1", "train.steps=3"]) == [
        "ffn=mlp seed=0 train.steps=3",
        "ffn=mlp seed=1 train.steps=3",
        "ffn=swiglu seed=0 train.steps=3",
        "ffn=swiglu seed=1 train.steps=3",
    ]


def test_all_of_hydras_discrete_sweeps():
    assert lines(["seed=range(0,3)"]) == ["seed=0", "seed=1", "seed=2"]
    assert lines(["optim.lr=choice(0.1,0.2)"]) == ["optim.lr=0.1", "optim.lr=0.2"]
    assert lines(["x='a,b'"]) == ["x='a,b'"]
    assert lines(["stream=[a,b],[]"]) == ["stream=[a,b]", "stream=[]"]
    assert lines(["seed=1"]) == ["seed=1"]
    assert lines([]) == [""]
    with pytest.raises(UserError, match="interval"):
        expand(["optim.lr=interval(0,1)"], {}, {})
    with pytest.raises(UserError, match="cannot be read"):
        expand(["ffn=[mlp"], {}, {})


def test_glob_knows_the_configs(root: Path):
    jobs = expand(["ffn=glob(*glu,exclude=t*)"], {}, {}, config_loader(root / "configs"))
    assert [job.label for job in jobs] == ["geglu", "glu", "reglu", "swiglu"]
    with pytest.raises(UserError, match="no value fits"):
        expand(["ffn=glob(nonesuch*)"], {}, {}, config_loader(root / "configs"))


def test_arms_vary_fastest_and_the_command_line_beats_them_and_they_beat_params():
    arms = {"none": ["threshold=none"], "fixed": ["threshold=fixed", "threshold.init=0.1"]}
    params = {"seed": "range(0,2)", "threshold.init": 9, "act": None}
    assert lines([], {"seed": "0,1"}, arms) == [
        "seed=0 threshold=none",
        "seed=0 threshold=fixed threshold.init=0.1",
        "seed=1 threshold=none",
        "seed=1 threshold=fixed threshold.init=0.1",
    ]
    assert lines(["seed=7"], params, arms) == [
        "threshold.init=9 act=null seed=7 threshold=none",
        "act=null seed=7 threshold=fixed threshold.init=0.1",
    ]
    assert lines(["threshold.init=0.5"], {}, arms) == [
        "threshold.init=0.5 threshold=none",
        "threshold.init=0.5 threshold=fixed",
    ]


def test_an_arm_may_have_several_values_of_its_own():
    arms = {"both": ["seed=0,1"], "data": ["seed=0", "data.seed=0,1"]}
    assert lines([], {}, arms) == ["seed=0", "seed=1", "seed=0 data.seed=0", "seed=0 data.seed=1"]
    assert {job.label for job in expand([], {}, arms)} == {"both", "data"}


def test_some_arms_only():
    arms = {"a": ["x=1"], "b": ["x=2"], "c": ["x=3"]}
    assert lines(["arm=c,a"], {}, arms) == ["x=3", "x=1"]
    assert lines(["arm=b"], {}, arms) == ["x=2"]
    with pytest.raises(UserError, match="unknown arm 'd'"):
        expand(["arm=d"], {}, arms)
    assert [job.label for job in expand(["arm=mine", "seed=0,1"], {}, {})] == ["mine", "mine"]


def test_equal_jobs_are_one_and_out_is_refused():
    assert lines(["seed=0,0"]) == ["seed=0"]
    with pytest.raises(UserError, match="study=NAME"):
        expand(["out=x", "seed=0,1"], {}, {})


def test_labels_say_what_differs():
    def labels(*command: str) -> list[str]:
        return [job.label for job in expand(command, {}, {})]

    assert labels("ffn=mlp,swiglu", "act=gelu", "seed=0,1") == ["mlp", "mlp", "swiglu", "swiglu"]
    assert labels("ffn=mlp", "optim.lr=0.1,1e-3") == ["lr0.1", "lr0.001"]
    assert labels("norm@norm_ffn=none", "model.tie_head=true,false") == ["tie_headTrue", "tie_headFalse"]
    assert labels("seed=0,1") == ["", ""]
    assert slug("../../evil; rm -rf /") == "evil-rm-rf"
    assert slug("/") == "run"
    assert len(slug("x" * 500)) == 48


def test_the_digest_sees_what_changes_a_result_only():
    cfg = {"seed": 0, "optim": {"lr": 0.1}, "out": "a", "study": None, "arm": "x", "logger": {"mode": "auto"}}
    same = {**cfg, "out": "b", "study": "s", "arm": "y", "logger": {}, "hydra": {}}
    assert digest(cfg) == digest(same) == digest(dict(reversed(cfg.items())))
    assert digest(cfg) != digest({**cfg, "seed": 1})
    assert len(digest(cfg)) == 8


# ---- the sweeper on the real configs, with a launcher that only notes what it is given


class Noting:
    """Stands in for a launcher: every job is done at once, with the loss that `losses` has for a word in its
    folder's name, else 4.5; inf is a run that diverged, nan one that failed. Notes in `jobs`.
    """

    def __init__(self, losses: dict[str, float], jobs: list[list[str]]) -> None:
        self.losses, self.jobs = losses, jobs

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        self.jobs += [list(o) for o in job_overrides]
        return [self.outcome(folder(overrides)) for overrides in job_overrides]

    def outcome(self, out: Path) -> JobReturn:
        loss = next((loss for word, loss in self.losses.items() if word in out.name), 4.5)
        if math.isnan(loss):
            return _start.ended("exit code 1")
        record(out, "diverged" if math.isinf(loss) else "done", loss=loss)
        return JobReturn(status=JobStatus.COMPLETED)


def folder(overrides: Sequence[str]) -> Path:
    return Path(next(o for o in overrides if o.startswith("out="))[4:].strip("'"))


def record(out: Path, status: str, loss: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps({"status": status}))
    row = {"step": 3, "val/loss": loss if math.isfinite(loss) else None, "time_s": 61.0}
    (out / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def sweep(root: Path, command: Sequence[str], *hydra: str, **settings: Any) -> list[list[str]]:
    loader = config_loader(root / "configs")
    config = loader.load_configuration("train", [*hydra, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    HydraConfig.instance().set_config(config)
    params, arms = settings.get("params", {}), settings.get("arms", {})
    sweeper = ArmsSweeper(params, arms, settings.get("tune", {}), list(command))
    launcher = Noting(settings.get("losses", {}), settings.get("jobs", []))
    sweeper.setup(
        hydra_context=HydraContext(loader, Callbacks()), task_function=lambda cfg: None, config=config
    )
    sweeper.runner = launcher  # type: ignore[assignment]
    sweeper.sweep([])
    return launcher.jobs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_job_has_its_folder_and_a_second_sweep_does_only_what_is_left(
    here: Path, root: Path, capsys: pytest.CaptureFixture[str]
):
    jobs = sweep(root, ["ffn=mlp,swiglu", "seed=0,1"])
    outs = [folder(job) for job in jobs]
    assert [out.name[:-9] for out in outs] == ["mlp-s0", "mlp-s1", "swiglu-s0", "swiglu-s1"]
    assert {out.parent for out in outs} == {Path("outputs/sweep")}
    assert jobs[0][-3:] == ["study='sweep'", "arm='mlp'", f"out='{outs[0]}'"]
    record(outs[1], "interrupted", 5.0)
    record(outs[2], "diverged", 5.0)
    capsys.readouterr()
    assert [folder(job) for job in sweep(root, ["ffn=mlp,swiglu", "seed=0,1,2"])] == [
        outs[1],
        *(o for o in sorted(Path("outputs/sweep").iterdir()) if "-s2-" in o.name),
    ]
    table = capsys.readouterr().out
    assert "6 jobs" in table
    assert "diverged (before)" in table
    assert "4.5000" in table
    assert "1:01" in table
    assert sorted(here.iterdir()) == [here / "outputs"]  # no multirun.yaml, no folder of Hydra's


def test_the_study_names_the_folder_and_where_it_is_recorded_does_not_change_the_job(here: Path, root: Path):
    (one,), (two,) = sweep(root, ["seed=0"]), sweep(root, ["seed=0", "study=a b/../c", "logger=none"])
    assert folder(one).parent == Path("outputs/sweep")
    assert folder(two).parent == Path("outputs/a-b-..-c")
    assert folder(one).name == folder(two).name
    assert folder(one).name.startswith("mlp-relu2-s0-")


def test_arms_of_an_experiment(here: Path, root: Path):
    arms = {"none": ["threshold=none"], "neg": ["threshold=learned", "threshold.init=-0.5"]}
    jobs = sweep(root, ["seed=0,1", "study=c"], arms=arms)
    assert [folder(job).name[:-9] for job in jobs] == ["none-s0", "neg-s0", "none-s1", "neg-s1"]
    assert "arm='neg'" in jobs[1]


def test_what_only_fits_some_jobs_fails_only_there(
    here: Path, root: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        sweep(root, ["threshold=none,learned", "threshold.init=0.5"])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert "threshold=none has no 'init'" in shown.err
    assert "invalid" in shown.out
    assert [p.name[:10] for p in Path("outputs/sweep").iterdir()] == ["learned-s0"]


def test_a_choice_that_does_not_exist_starts_nothing(here: Path, root: Path):
    with pytest.raises(UserError) as error:
        sweep(root, ["ffn=mlp,swigl,gleu", "seed=0,1"])
    assert [p.split(":")[0] for p in error.value.problems] == ["ffn=swigl", "ffn=gleu"]
    with pytest.raises(UserError, match=r"unknown key 'train\.stps'"):
        sweep(root, ["ffn=mlp,swiglu", "train.stps=3"])
    assert list(here.iterdir()) == []


TUNE = {"key": "optim.lr", "values": [0.01, 0.02], "seeds": [100]}


def test_every_arm_is_tuned_on_other_seeds_and_runs_with_its_best_value(
    here: Path, root: Path, capsys: pytest.CaptureFixture[str]
):
    losses = {"mlp-lr0.02": 4.2, "swiglu-lr0.01": 4.1, "reglu-lr0.01": math.nan}
    with pytest.raises(SystemExit) as stop:
        sweep(root, ["ffn=mlp,swiglu,reglu", "seed=0"], tune=TUNE, losses=losses, jobs=(jobs := []))
    assert stop.value.code == 1  # an arm whose trial failed is not run
    assert [(folder(job).parent.name, folder(job).name[:-9]) for job in jobs] == [
        *(("tune", f"{ffn}-lr{lr}-s100") for ffn in ("mlp", "swiglu", "reglu") for lr in (0.01, 0.02)),
        *(("sweep", f"{ffn}-s0") for ffn in ("mlp", "swiglu")),
    ]
    assert "optim.lr=0.02" in jobs[-2]
    assert "optim.lr=0.01" in jobs[-1]
    shown = capsys.readouterr()
    assert "mlp: tuned: optim.lr=0.02 (val/loss 0.01: 4.5000, 0.02: 4.2000)\n" in shown.out
    assert "reglu: not tuned: a trial of optim.lr did not come to an end" in shown.out + shown.err


def test_the_best_value_has_the_lowest_mean_and_none_where_all_diverged(tmp_path: Path):
    tune = Tune.of("optim.lr", [0.01, 0.02, 0.04], [7, 8])

    def settled(*losses: tuple[float, float]) -> tuple[Job, str]:
        trials = tune.trials(Job(["ffn=mlp", "seed=3", "data.seed=4"], "mlp"))
        for (value, jobs), pair in zip(trials.items(), losses, strict=True):
            assert [job.overrides for job in jobs] == [["ffn=mlp", value, f"seed={s}"] for s in (7, 8)]
            for job, loss in zip(jobs, pair, strict=True):
                job.out = tmp_path / f"{value}-{loss}"
                record(job.out, "diverged" if math.isinf(loss) else "done", loss)
        arm = Job(["ffn=mlp", "seed=3"], "mlp")
        return arm, tune.settle(arm, trials)

    job, said = settled((4.0, 4.4), (4.1, 4.2), (3.0, math.inf))
    assert job.overrides[-1] == "optim.lr=0.02"
    assert said == "tuned: optim.lr=0.02 (val/loss 0.01: 4.2000, 0.02: 4.1500, 0.04: inf)"
    job, said = settled((4.4, 4.4), (4.3, 4.3), (4.2, 4.2))
    assert job.overrides[-1] == "optim.lr=0.04"
    assert said.endswith("; the best is at the end of the values: try some beyond")
    job, said = settled(*[(4.0, math.inf)] * 3)
    assert job.problems == ["not tuned: every value of optim.lr diverged"]


@pytest.mark.parametrize(
    ("tune", "command", "said"),
    [
        (TUNE, ["seed=99,100"], "100 is also a seed of the study"),
        (TUNE, ["seed=range(98,102)"], "100 is also a seed of the study"),
        (TUNE, ["seed=0", "data.seed=1,100"], "100 is also a data.seed of the study"),
        (TUNE | {"seeds": [0, 7]}, [], "0 is also a seed of the study"),  # the default
        (TUNE, ["optim.lr=0.3"], "optim.lr is tuned .* and given as well"),
        (TUNE | {"key": "optim.lrr"}, [], "unknown key 'optim.lrr'"),
        (TUNE | {"values": [0.1]}, [], r"values=\[0.1\]: expected two or more, all different"),
        (TUNE | {"seeds": []}, [], r"seeds=\[\]: expected one or more"),
        (TUNE | {"key": "seed"}, [], "seeds are not tuned"),
    ],
)
def test_tuning_that_is_unfair_or_makes_no_sense_starts_nothing(
    here: Path, root: Path, tune: dict, command: list[str], said: str
):
    with pytest.raises(UserError, match=said):
        sweep(root, command, tune=tune)
    assert list(here.iterdir()) == []


def test_the_seeds_of_an_arm_and_of_the_grid_are_seen_by_the_tuning(here: Path, root: Path):
    arms = {"init": ["seed=0,1"], "data": ["seed=0", "data.seed=range(100,102)"]}
    with pytest.raises(UserError, match=r"tune\.seeds: 100, 101 is also a data\.seed of the study"):
        sweep(root, [], arms=arms, tune=TUNE | {"seeds": [100, 101, 102]})
    with pytest.raises(UserError, match=r"tune\.seeds: 5 is also a seed"):
        sweep(root, [], params={"seed": "range(4,6)"}, tune=TUNE | {"seeds": [5]})
    assert list(here.iterdir()) == []


# ---- the launcher with a script that stands in for train.py and misbehaves

SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
given = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:] if "=" in a)
out, do = Path(given["out"].strip("'")), given["do"]
out.mkdir(parents=True, exist_ok=True)
def end(status, code):
    info = {"status": status, "argv": sys.argv[1:], "env": os.environ["FFNLAB_JOB"]}
    (out / "run.json").write_text(json.dumps(info))
    sys.exit(code)
def save(signum, frame):
    end("interrupted", 128 + signum)
print("hello", do, flush=True)
(out / "started").touch()
if do == "ok": end("done", 0)
if do == "diverge": end("diverged", 3)
if do == "exit": sys.exit(7)
if do == "raise": raise RuntimeError("boom")
if do == "kill": os.kill(os.getpid(), signal.SIGKILL)
if do == "orphan":
    (out / "orphan").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    end("done", 0)
if do == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
if do == "wait":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
time.sleep(60)
"""

DRIVER = """
import sys
from omegaconf import OmegaConf
from hydra_plugins.ffnlab_sweep import _start, _process
_start.script = lambda: sys.argv[1]
launcher = _process.ProcessLauncher(parallel=int(sys.argv[2]), timeout_s=None, grace_s=5)
node = {"runtime": {"config_sources": []}, "overrides": {"hydra": []}, "job": {"config_name": "train"}}
launcher.setup(hydra_context=None, task_function=None, config=OmegaConf.create({"hydra": node}))
returns = launcher.launch([[f"do={d}", f"out='outputs/x/{i}-{d}'"] for i, d in enumerate(sys.argv[3:])], 0)
print([str(r._return_value) for r in returns])
sys.exit(128 + launcher.stopped if launcher.stopped else 0)
"""


def hydra_config(*overrides: str) -> DictConfig:
    main = {"provider": "main", "path": "/configs"}
    runtime = {"config_sources": [{"provider": "hydra", "path": "x"}, main]}
    node = {"runtime": runtime, "overrides": {"hydra": list(overrides)}, "job": {"config_name": "train"}}
    return OmegaConf.create({"hydra": node})


def launch(here: Path, monkeypatch: pytest.MonkeyPatch, dos: Sequence[str], *overrides: str, **settings):
    script = here / "fake.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(_start, "script", lambda: str(script))
    launcher = ProcessLauncher(**{"parallel": 1, "timeout_s": None, "grace_s": 5.0, **settings})
    launcher.setup(hydra_context=None, task_function=None, config=hydra_config(*overrides))  # type: ignore[arg-type]
    outs = [Path("outputs/x") / f"{i}-{do}" for i, do in enumerate(dos)]
    jobs = [[f"do={do}", f"out='{out}'"] for do, out in zip(dos, outs, strict=True)]
    returns = launcher.launch(jobs, 0)
    return outs, [str(r._return_value) if r.status == JobStatus.FAILED else "ok" for r in returns]


def test_no_job_can_end_the_sweep(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    outs, ended = launch(here, monkeypatch, ["exit", "raise", "kill", "diverge", "ok"], parallel=2)
    assert ended == ["exit code 7", "exit code 1", "killed by SIGKILL (out of memory?)", "ok", "ok"]
    assert status(outs[4]) == "done"
    shown = capsys.readouterr().out
    assert "FAILED 1-raise: exit code 1" in shown
    assert "| RuntimeError: boom" in shown
    assert "[5/5]" in shown
    assert "RuntimeError: boom" in (here / "outputs/x/1-raise.log").read_text()


def test_a_job_that_cannot_be_started_does_not_end_the_sweep(here: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is full when its log is opened."""
    real = _start.start

    def start(train: str, words: Sequence[str], out: Path, index: int) -> subprocess.Popen[bytes]:
        if index == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(train, words, out, index)

    monkeypatch.setattr(_start, "start", start)
    outs, ended = launch(here, monkeypatch, ["ok", "ok", "ok"])
    assert ended == ["ok", f"cannot be started: [Errno 28] {os.strerror(errno.ENOSPC)}", "ok"]
    assert [status(out) for out in outs] == ["done", None, "done"]


@pytest.mark.slow
def test_twenty_jobs_start_at_once(here: Path, monkeypatch: pytest.MonkeyPatch):
    outs, ended = launch(here, monkeypatch, ["ok"] * 20, parallel=20)
    assert ended == ["ok"] * 20
    assert len(set(outs)) == 20
    assert {json.loads((out / "run.json").read_text())["env"] for out in outs} == set(map(str, range(20)))


def test_a_job_that_hangs_is_ended_politely_then_killed(here: Path, monkeypatch: pytest.MonkeyPatch):
    outs, ended = launch(
        here, monkeypatch, ["wait", "stubborn", "ok"], parallel=3, timeout_s=1.5, grace_s=1.0
    )
    assert ended == ["timeout after 1.5 s", "timeout after 1.5 s, killed after 1 s of grace", "ok"]
    assert status(outs[0]) == "interrupted"


def test_what_a_job_leaves_behind_is_ended(here: Path, monkeypatch: pytest.MonkeyPatch):
    (out,), _ = launch(here, monkeypatch, ["orphan"])
    assert gone(int((out / "orphan").read_text()))


def test_what_a_job_is_told(here: Path, monkeypatch: pytest.MonkeyPatch):
    passed = ["hydra.searchpath=[file:///x]", "hydra.launcher.parallel=2", "hydra.mode=MULTIRUN"]
    (out,), _ = launch(here, monkeypatch, ["ok"], *passed, parallel=2)
    info = json.loads((out / "run.json").read_text())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = f"train.threads={max(1, cores // 2)}"
    assert info["argv"] == [
        *("--config-path", "/configs", "--config-name", "train", "hydra.searchpath=[file:///x]"),
        *("do=ok", f"out='{out}'", threads, "hydra.mode=RUN"),
    ]
    assert info["env"] == "0"
    (out / "config.yaml").write_text("train: {threads: 7}\n")  # a run that is resumed keeps its thread count
    launch(here, monkeypatch, ["ok"], parallel=2)
    assert "train.threads=7" in json.loads((out / "run.json").read_text())["argv"]


def test_settings_of_the_launcher_are_checked():
    for wrong in ({"parallel": 0}, {"timeout_s": float("nan")}, {"timeout_s": 0.0}, {"grace_s": -1.0}):
        launcher = ProcessLauncher(**{"parallel": 1, "timeout_s": None, "grace_s": 1.0, **wrong})
        with pytest.raises(UserError, match="parallel >= 1, timeout_s > 0 or null, grace_s >= 0"):
            launcher.setup(hydra_context=None, task_function=None, config=hydra_config())  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def drive(here: Path, root: Path, parallel: int, *dos: str) -> subprocess.Popen[str]:
    """A sweep in a process of its own, as far as its first job's start."""
    (here / "fake.py").write_text(SCRIPT)
    (here / "driver.py").write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, "driver.py", str(here / "fake.py"), str(parallel), *dos],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    started = [here / f"outputs/x/{i}-{do}/started" for i, do in enumerate(dos[:parallel])]
    for _ in range(300):
        if all(path.exists() for path in started):
            time.sleep(0.5)  # for its signal handlers
            break
        time.sleep(0.1)
    return driver


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_running_jobs_and_ends_the_sweep(here: Path, root: Path, signum: int, code: int):
    driver = drive(here, root, 2, "wait", "wait", "ok")
    driver.send_signal(signum)
    shown, _ = driver.communicate(timeout=30)
    assert driver.returncode == code
    assert "['interrupted', 'interrupted', 'not started']" in shown
    assert status(here / "outputs/x/0-wait") == status(here / "outputs/x/1-wait") == "interrupted"
    assert not (here / "outputs/x/2-ok").exists()


def test_a_second_signal_does_not_wait(here: Path, root: Path):
    driver = drive(here, root, 1, "stubborn")
    driver.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    start = time.monotonic()
    driver.send_signal(signal.SIGTERM)
    driver.communicate(timeout=30)
    assert driver.returncode == 143
    assert time.monotonic() - start < 4  # grace is 5 s


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_jobs_end_when_the_sweep_itself_is_killed(here: Path, root: Path):
    driver = drive(here, root, 1, "wait")
    driver.kill()
    driver.wait()
    for _ in range(100):
        if status(here / "outputs/x/0-wait") == "interrupted":
            return
        time.sleep(0.1)
    pytest.fail("the job went on")


# ---- the view


def test_the_end_of_a_record_is_read(tmp_path: Path):
    assert last_row(tmp_path) == {}
    text = '{"step": 1, "val/loss": 5.0}\n{"step": 2, "val/loss": null}\n{"step": 3}\n{"step": 4, "va'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_row(tmp_path) == {"step": 3}
    assert last_row(tmp_path, "val/loss") == {"step": 1, "val/loss": 5.0}
    assert [clock(s) for s in (None, 5, 65, 3725)] == ["-", "0:05", "1:05", "1:02:05"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal that keeps what is written to it."""
    made = Console(force_terminal=True, file=io.StringIO(), width=120, color_system=None, highlight=False)
    monkeypatch.setattr(_view, "console", lambda: made)
    return made


def test_the_live_view_shows_jobs_eta_and_the_best_so_far(
    tmp_path: Path, terminal: Console, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr(_view.time, "monotonic", lambda: now[0])
    before, a, b, c = (tmp_path / name for name in ("before", "a", "b", "c"))
    record(before, "done", 4.3)
    record(a, "done", 4.2)
    for out, step in ((b, 30), (c, 20)):
        record(out, "running", 4.9)
        (out / "config.yaml").write_text("train: {steps: 60}\n")
        (out / "metrics.jsonl").write_text(f'{{"step": {step}, "train/loss": 4.5, "time_s": 9.0}}\n')
    assert isinstance(terminal.file, io.StringIO)
    with _view.View(4, [before]) as view:
        assert view.live

        def shown(*running: Path) -> str:
            view.tick([(out, 65.0) for out in running])
            terminal.file.truncate(0)
            view.live.refresh()
            return terminal.file.getvalue()

        for out in (a, c):
            view.started(out)
        first = shown(a, c)  # c is a run that is resumed at step 20: no work of ours yet
        assert "  a  starting  1:05\n" in first
        assert "  c  step 20/60  loss 4.5000  1:05\n" in first
        assert "1/5 jobs · ETA - · best val/loss 4.3000 (before)" in first
        view.ended(a, 70.0, None, tmp_path / "a.log")
        assert "[2/5] done a  val/loss 4.2000  1:10" in terminal.file.getvalue()
        view.started(b)
        shown(b, c)
        now[0] = 100.0
        (c / "metrics.jsonl").write_text('{"step": 40, "train/loss": 4.4}\n')
        # 1 + 1/3 jobs in 100 s; to do: half of b, a third of c, and one that waits
        last = shown(b, c)
        assert "2/5 jobs · ETA 2:17 · best val/loss 4.2000 (a)" in last
        view.ended(b, 9.0, "exit code 7", tmp_path / "b.log")
        assert "3/5 jobs · 1 failed · ETA" in shown(c)


# ---- the whole of it


TINY = [
    "model.n_layers=2",
    "model.d_model=16",
    "model.n_heads=2",
    "train.steps=2",
    "data=counting",
    "logger=none",
]


@pytest.mark.slow
def test_hydra_and_the_sweeper_hold_one_launcher(tmp_path: Path, root: Path):
    """As train.py has it: Hydra executes modules of plugins, also those that are imported already."""
    code = (
        "from hydra.core.config_store import ConfigStore\n"
        "from hydra.core.plugins import Plugins\n"
        "from hydra_plugins.ffnlab_sweep import arms\n"
        "name = arms.ProcessLauncher.__module__ + '.ProcessLauncher'\n"
        "assert Plugins.instance().class_name_to_class[name] is arms.ProcessLauncher\n"
        "assert ConfigStore.instance().load('hydra/launcher/process.yaml').node._target_ == name\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_jobs_share_the_cores_by_how_many_run_at_once(tmp_path: Path, root: Path):
    """Not by how many there are; and each is said to start and to end once."""
    words = ["-m", "seed=0,1,2", "tokenizer=byte", *TINY, "hydra.launcher.parallel=2"]
    command = [sys.executable, str(root / "train.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if re.match(r"\[\d/3\] (start|done)", line)]
    assert len(said) == len({line.split("  val")[0] for line in said}) == 6
    for run in (p for p in (tmp_path / "outputs/sweep").iterdir() if p.is_dir()):
        assert json.loads((run / "run.json").read_text())["threads"] == max(1, _start.cores() // 2)


def test_an_interrupted_sweep_says_so_by_its_code(tmp_path: Path, root: Path):
    words = ["-m", "seed=0,1", "tokenizer=byte", *TINY, "train.steps=100000", "train.log_every=1000"]
    sweep = subprocess.Popen(
        [sys.executable, str(root / "train.py"), *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("outputs/sweep/*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.2)
        sweep.send_signal(signal.SIGINT)
        said, _ = sweep.communicate(timeout=120)
    finally:
        sweep.kill()
    assert sweep.returncode == 130, said
    assert re.search(r"-s1 +│ not started", said), said
    assert "FAILED" not in said


def test_a_real_sweep(tmp_path: Path, root: Path):
    words = ["-m", "ffn=mlp,swiglu", "tokenizer=byte", *TINY, "train.threads=1"]
    command = [sys.executable, str(root / "train.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(p for p in (tmp_path / "outputs/sweep").iterdir() if p.is_dir())
    assert [run.name[:-9] for run in runs] == ["mlp-s0", "swiglu-s0"]
    assert [status(run) for run in runs] == ["done", "done"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outputs"]
    done = subprocess.run([*command, "seed=0"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0
    assert done.stdout.count("done (before)") == 2
    # T8: a job alone is the job in a sweep
    words = ["ffn=swiglu", "tokenizer=byte", *TINY, "train.threads=1", "out=alone"]
    subprocess.run([command[0], command[1], *words], cwd=tmp_path, capture_output=True, check=True)
    assert list(unequal(tmp_path / "alone", runs[1])) == []
