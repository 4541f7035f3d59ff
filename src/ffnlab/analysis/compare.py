"""Runs compared: arms over seeds, differences from a baseline with their tests, and what each arm costs."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ffnlab.analysis.arms import Arm, Seed, find, group
from ffnlab.analysis.contrasts import Analysis, Question, analyse
from ffnlab.analysis.costs import Cost, costs
from ffnlab.analysis.fairness import check_same_task, unfair
from ffnlab.analysis.health import ailments
from ffnlab.analysis.runs import Run
from ffnlab.errors import UserError, unknown

LOSS = re.compile(r"(train|val|test)/(loss|bits_per_byte)")
MARGIN = 0.01  # nats per token, or bits per byte


@dataclass(frozen=True)
class Comparison:
    """The outcome. `values` holds the last value of the metric of every run that has one."""

    metric: str
    question: Question
    target: float | None
    arms: dict[str, Arm]
    values: dict[str, dict[Seed, float]]
    analysis: Analysis
    costs: dict[str, Cost]
    unfinished: list[Run]  # left out
    warnings: list[str]

    @property
    def diverged(self) -> dict[str, int]:
        """arm -> the number of its runs that diverged, where there are any."""
        return {name: len(arm.diverged) for name, arm in self.arms.items() if arm.diverged}


def compare(
    paths: Sequence[Path],
    *,
    baseline: str | None = None,
    metric: str = "val/loss",
    margin: float | None = None,
    alpha: float = 0.05,
    by: Sequence[str] = (),
    target: float | None = None,
) -> Comparison:
    """Compare runs, or the runs in study folders.

    `baseline` is an arm (default: the first), `margin` the largest difference that does not matter (default:
    MARGIN for losses; for other metrics there is none), `by` what makes the arms (see `arms.group`), `target`
    the loss whose cost is asked for (default: the baseline's last one). A run that diverged counts as such
    and has no value; an unfinished one is left out. Raises UserError for what cannot be compared.
    """
    runs = find(paths)
    over = [run for run in runs if run.info.get("status") in ("done", "diverged")]
    if not over:
        listed = ", ".join(f"{run.path} ({status(run)})" for run in runs)
        raise UserError(f"no run is done: {listed}; the command of a run with the same out= goes on with it")
    arms = {arm.name: arm for arm in group(over, by)}
    values = last_values(arms, metric)
    is_loss = LOSS.fullmatch(metric) is not None
    if is_loss and metric.endswith("/loss"):
        check_same_task(arms, metric)
    question = Question(
        baseline=chosen_baseline(values, baseline),
        alpha=alpha,
        margin=MARGIN if margin is None and is_loss else margin,
        lower_is_better=is_loss,
    )
    return Comparison(
        metric=metric,
        question=question,
        target=target,
        arms=arms,
        values=values,
        analysis=analyse(values, question),
        costs=costs(arms, values, question.baseline, metric if is_loss else None, target),
        unfinished=[run for run in runs if run not in over],
        warnings=unfair(arms, metric) + ailments(arms),
    )


def status(run: Run) -> str:
    """The run's status, in words also where it has none yet."""
    return str(run.info.get("status", "not started"))


def last_values(arms: Mapping[str, Arm], metric: str) -> dict[str, dict[Seed, float]]:
    """The last value of a metric of every done run; one in which it is not finite moves to the diverged.

    Raises UserError where a run lacks the metric, with those that it has.
    """
    values: dict[str, dict[Seed, float]] = {name: {} for name in arms}
    problems = []
    for name, arm in arms.items():
        for seed, run in list(arm.runs.items()):
            _, series = run.series(metric)
            if not len(series):
                problems.append(f"{run.path}: {unknown('metric', metric, run.keys('.+/.+'))}")
            elif math.isfinite(series[-1]):
                values[name][seed] = float(series[-1])
            else:
                arm.diverged[seed] = arm.runs.pop(seed)
    if problems:
        raise UserError(*problems)
    return values


def chosen_baseline(values: Mapping[str, Mapping[Seed, float]], wanted: str | None) -> str:
    """The arm that the others are compared with: the one wanted, else the first that has values."""
    if wanted is not None and wanted not in values:
        raise UserError(unknown("arm", wanted, values))
    having = [name for name in values if values[name]]
    if not having:
        raise UserError("all runs diverged: there is nothing to compare")
    if wanted is not None and wanted not in having:
        raise UserError(f"all runs of the baseline '{wanted}' diverged; others: {', '.join(having)}")
    return wanted or having[0]
