"""Tuning before a sweep: every arm gets the same trials, on other seeds; its runs get the best value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ffnlab.errors import UserError
from hydra_plugins.ffnlab_sweep._jobs import Job, word
from hydra_plugins.ffnlab_sweep._view import final_loss

FOLDER = "tune"  # trials lie under outputs/<study>/tune, so that they do not count as runs of the study
SEEDS = ("seed", "data.seed")  # what tells the runs of one arm apart


@dataclass(frozen=True)
class Tune:
    """hydra.sweeper.tune: {key: optim.lr, values: [0.01, 0.02, 0.04], seeds: [100, 101]}."""

    key: str
    values: list[str]  # as overrides: optim.lr=0.01
    seeds: list[int]

    @classmethod
    def of(cls, key: str, values: Sequence[Any], seeds: Sequence[int]) -> "Tune":
        """From plain values; raises UserError with all that is wrong."""
        problems = []
        if key in SEEDS:
            problems.append(f"key={key}: seeds are not tuned")
        if len({str(value) for value in values}) < max(2, len(values)):
            problems.append(f"values={list(values)}: expected two or more, all different")
        if not seeds:
            problems.append("seeds=[]: expected one or more, others than those of the study")
        if problems:
            raise UserError(*(f"hydra.sweeper.tune.{line}" for line in problems))
        return cls(key, [f"{key}={'null' if value is None else value}" for value in values], list(seeds))

    def check(self, jobs: Sequence[Job], seeds: Mapping[str, set[int]]) -> None:
        """Raises UserError where jobs give the key themselves, or share a seed with the trials. `seeds`: the
        values that `seed` and `data.seed` take in the jobs, wherever they are set.
        """
        keys = {text.partition("=")[0].lstrip("+~") for job in jobs for text in job.overrides}
        problems = []
        if self.key in keys:
            problems.append(f"{self.key} is tuned (hydra.sweeper.tune) and given as well: leave one out")
        left = set(self.seeds)
        for name, used in seeds.items():
            both, left = sorted(used & left), left - used  # data.seed follows seed where it is not given
            if both:
                problems.append(
                    f"hydra.sweeper.tune.seeds: {', '.join(map(str, both))} is also a {name} of the study: a "
                    "value chosen on the runs that it is judged by looks better than it is"
                )
        if problems:
            raise UserError(*problems)

    def trials(self, job: Job) -> dict[str, list[Job]]:
        """value -> a job for each seed, of the arm of a job."""
        return {
            value: [
                Job([*arm_of(job), value, f"seed={seed}"], f"{job.label}-{word(self.key, value)}".lstrip("-"))
                for seed in self.seeds
            ]
            for value in self.values
        }

    def settle(self, job: Job, trials: Mapping[str, Sequence[Job]]) -> str:
        """The value with the lowest mean loss of an arm's trials goes into a job of the arm, or a problem
        where there is none; the sentence that says so.
        """
        losses = {value: mean_loss(same) for value, same in trials.items()}
        known = {value: loss for value, loss in losses.items() if loss is not None}
        best = min(known, key=lambda value: known[value], default="")
        if len(known) < len(losses):
            job.problems = [f"not tuned: a trial of {self.key} did not come to an end"]
        elif known[best] == math.inf:
            job.problems = [f"not tuned: every value of {self.key} diverged"]
        else:
            job.overrides.append(best)
        shown = ", ".join(f"{value.partition('=')[2]}: {known.get(value, math.nan):.4f}" for value in losses)
        ends = len(losses) > 2 and best in (self.values[0], self.values[-1])
        hint = "; the best is at the end of the values: try some beyond" if ends and not job.problems else ""
        return f"{'; '.join(job.problems) or f'tuned: {best}'} (val/loss {shown}){hint}"


def arm_of(job: Job) -> tuple[str, ...]:
    """The overrides of a job without its seeds: jobs that share them are one arm."""
    return tuple(text for text in job.overrides if text.partition("=")[0].lstrip("+") not in SEEDS)


def mean_loss(trials: Sequence[Job]) -> float | None:
    """Over the trials of one value: inf when one diverged, None when one did not come to an end."""
    losses = [None if job.problems else final_loss(job.out) for job in trials]
    done = [loss for loss in losses if loss is not None]
    if len(done) < len(losses):
        return None
    mean = sum(done) / len(done)
    return mean if math.isfinite(mean) else math.inf
