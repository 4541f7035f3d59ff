"""Sweeper `arms`: named arms x grid, each job composed alone, finished ones skipped, a table at the end."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ffnlab.errors import UserError, report
from hydra_plugins.ffnlab_sweep import _jobs, _start, _view
from hydra_plugins.ffnlab_sweep._jobs import Job
from hydra_plugins.ffnlab_sweep._others import JobProcess, OtherLauncher
from hydra_plugins.ffnlab_sweep._process import ProcessLauncher
from hydra_plugins.ffnlab_sweep._tune import FOLDER, SEEDS, Tune, arm_of


@dataclass
class TuneConf:
    """Settings under `hydra.sweeper.tune`: without a key, nothing is tuned."""

    key: str | None = None  # optim.lr
    values: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # of the trials, others than those of the runs


@dataclass
class ArmsConf:
    """Settings under `hydra.sweeper`."""

    _target_: str = "hydra_plugins.ffnlab_sweep.arms.ArmsSweeper"
    params: dict[str, Any] = field(default_factory=dict)  # a grid: {seed: "range(0,8)"}
    arms: dict[str, list[str]] = field(default_factory=dict)  # {name: [override, ...]}
    tune: TuneConf = field(default_factory=TuneConf)  # before the runs, each arm alike
    command: list[str] | None = None  # the command line, from train.py


ConfigStore.instance().store(group="hydra/sweeper", name="arms", node=ArmsConf, provider="ffnlab")


class ArmsSweeper(Sweeper):
    """Expands, composes and names the jobs, launches those not done, ends with a table.

    A run goes to outputs/<study>/<arm>-s<seed>-<digest>. `study` is by default the experiment's name, else
    `sweep`; `arm` is by default what differs between the runs, else `<ffn>-<act>`. With `tune`, every arm
    first gets the same trials of one key on seeds of their own (under outputs/<study>/tune), and then runs
    with the value of the lowest mean validation loss.
    """

    def __init__(
        self,
        params: dict[str, Any],
        arms: dict[str, list[str]],
        tune: dict[str, Any],
        command: Sequence[str] | None,
    ):
        self.params, self.arms, self.tune, self.command = params, arms, tune, command

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's hook: called once, before `sweep`."""
        self.hydra_context, self.config, self.loader = hydra_context, config, hydra_context.config_loader
        self.master, self.name = config, str(config.hydra.job.config_name)
        with read_write(config.hydra.sweep):
            config.hydra.sweep.dir = str(_view.OUTPUTS)  # for what other launchers write of their own
        task = JobProcess(_start.script(), _start.arguments(config))
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task, config=config
        )
        self.runner: ProcessLauncher | OtherLauncher = (
            launcher if isinstance(launcher, ProcessLauncher) else OtherLauncher(launcher, config)
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep; leaves through SystemExit with 1 if a job failed, 128 + signal if it was stopped."""
        command = list(arguments if self.command is None else self.command)
        jobs = _jobs.expand(command, self.params, self.arms, self.loader)
        self._refuse_wrong_choices(jobs)
        if self.tune.get("key") is not None:
            self._tune(Tune.of(self.tune["key"], list(self.tune["values"]), list(self.tune["seeds"])), jobs)
        if self._carry_out(jobs):
            sys.exit(1)

    def _tune(self, tune: Tune, jobs: list[Job]) -> None:
        """Run the trials of every arm; its jobs get the best value, or a problem where there is none."""
        tune.check(jobs, self._seeds(jobs))
        arms = {arm_of(job): tune.trials(job) for job in jobs}
        trials = [job for values in arms.values() for same in values.values() for job in same]
        self._refuse_wrong_choices(trials)
        _view.console().print(
            f"tuning {tune.key}: {len(arms)} x {len(tune.values)} values x {len(tune.seeds)} seeds",
            markup=False,
        )
        self._carry_out(trials, FOLDER)
        said = dict.fromkeys(f"{job.label or 'all'}: {tune.settle(job, arms[arm_of(job)])}" for job in jobs)
        _view.console().print("\n".join(said), markup=False)

    def _seeds(self, jobs: list[Job]) -> dict[str, set[int]]:
        """The values of both seeds in all jobs: their own, their arm's, an experiment's or the default."""
        used: dict[str, set[int]] = {name: set() for name in SEEDS}
        for job in jobs:
            with suppress(HydraException, OmegaConfBaseException):  # said when the job is planned
                cfg = self._compose(job.overrides)
                for name in SEEDS:
                    used[name].add(OmegaConf.select(cfg, name))
        return used

    def _carry_out(self, jobs: list[Job], folder: str = "") -> int:
        """Plan the jobs, launch those not done, print the table; the number of those that failed. Leaves
        through SystemExit when a signal stopped them.
        """
        with _view.busy(f"composing {len(jobs)} jobs"):
            for job in jobs:
                if not job.problems:
                    self._plan(job, folder)
        if all(job.problems for job in jobs):
            raise UserError(*(problem for job in jobs for problem in job.problems))
        for job in jobs:
            if job.problems:
                print(report(job.problems, f"skipped {' '.join(job.overrides)}"), file=sys.stderr)
        invalid = [job for job in jobs if job.problems]
        jobs = [*{job.out: job for job in jobs if not job.problems}.values(), *invalid]
        self.runner.earlier = [job.out for job in jobs if not job.problems and _view.finished(job.out)]
        ready = [job for job in jobs if not job.problems and not _view.finished(job.out)]
        returns = self.runner.launch([job.overrides for job in ready], 0) if ready else []
        outcomes = zip(ready, returns, strict=True)
        notes = {
            job.out: str(ret._return_value) for job, ret in outcomes if ret.status != JobStatus.COMPLETED
        }
        failed = _view.table(jobs, notes, fresh={job.out for job in ready})
        if stopped := getattr(self.runner, "stopped", None):
            sys.exit(128 + stopped)
        return failed

    def _refuse_wrong_choices(self, jobs: list[Job]) -> None:
        """A choice that does not exist is a slip, not a job that happens not to fit: nothing is started."""
        from ffnlab.explain import Tree, choice_problems

        tree = Tree(self.loader, self._searchpath(), self.name)
        parser = OverridesParser.create(self.loader)
        texts = dict.fromkeys(text for job in jobs for text in job.overrides)
        parsed = [parser.parse_override(text) for text in texts]
        if problems := [p for o in parsed if tree.is_choice(o) for p in choice_problems(o, tree)]:
            raise UserError(*problems)

    def _plan(self, job: Job, folder: str) -> None:
        """Compose and check one job; sets its folder and overrides, or its problems."""
        from ffnlab.config import plain
        from ffnlab.validate import validate

        try:
            cfg = self._compose(job.overrides)
            study = _jobs.slug(cfg.study or cfg.hydra.runtime.choices.get("experiment") or "sweep")
            choices = cfg.hydra.runtime.choices
            with open_dict(cfg):
                del cfg["hydra"]
            values = plain(cfg)
            validate(values)
        except (UserError, HydraException, OSError, ValueError) as error:
            job.problems = self._explain(job.overrides) or [str(error)]
            return
        job.label = job.label or _jobs.slug(f"{choices.get('ffn')}-{choices.get('act')}")
        job.out = _view.OUTPUTS / study / folder / f"{job.label}-s{values['seed']}-{_jobs.digest(values)}"
        own = ("study=", "arm=")
        job.overrides = [o for o in job.overrides if not o.startswith(own)]
        job.overrides += [f"study='{study}'", f"arm='{job.label}'", f"out='{job.out}'"]

    def _compose(self, overrides: list[str]) -> DictConfig:
        return self.loader.load_sweep_config(self.master, [*overrides, "hydra.mode=RUN"])

    def _searchpath(self) -> list[str]:
        return [o for o in self.master.hydra.overrides.hydra if o.startswith("hydra.searchpath=")]

    def _explain(self, overrides: list[str]) -> list[str]:
        from ffnlab.config import plain
        from ffnlab.explain import explain
        from ffnlab.validate import validate

        return explain(
            [*self._searchpath(), *overrides], self.loader, lambda cfg: validate(plain(cfg)), self.name
        )
