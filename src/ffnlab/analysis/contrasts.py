"""Every arm against the baseline: the test that its seeds allow, what it says, and the verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ffnlab.analysis import stats
from ffnlab.analysis.arms import Seed

POWER = 0.8
WILD = 0.001  # p below which an arm is said to scatter more than the others
FLIPS_FROM = 6  # common seeds; with fewer, no sign-flip test can come below 0.05
# What a verdict needs. An sd from 1 degree of freedom may be 32 times too small, from 3 still 3.7 times (the
# upper ends of the 95 % intervals, by chi^2).
LEAST_SEEDS, LEAST_FREEDOM = 3, 3
NO_RESIDUAL = (
    "every seed gives the same difference to the last digit: there is no residual to test it against"
)

Values = Mapping[str, Mapping[Seed, float]]  # arm -> seed -> value of the metric


@dataclass(frozen=True)
class Question:
    """What is asked of every contrast; without a margin no equivalence is tested."""

    baseline: str
    alpha: float
    margin: float | None
    lower_is_better: bool  # else nothing is known to be better


@dataclass(frozen=True)
class Contrast:
    """An arm against the baseline; what was not tested is None."""

    seeds: int  # common ones when paired, else the fewer of the two sides
    method: str  # paired: additive model; unpaired: Welch; none: not tested
    difference: float  # arm - baseline
    low: float | None = None  # confidence interval at level 1 - alpha, not adjusted
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    p_flips: float | None = None
    p_flips_smallest: float | None = None  # that a test of so many seeds can give
    p_equivalence: float | None = None
    seeds_needed: int | None = None  # to find a difference of `margin`; None: more than MOST_SEEDS
    verdict: str = ""
    no_verdict: str = ""  # why it was not tested


@dataclass(frozen=True)
class Analysis:
    """All contrasts, and the residual that the paired ones share: its sd is NaN without freedom."""

    contrasts: dict[str, Contrast]
    residual_sd: float
    residual_df: int
    wild: dict[str, float]  # arms that scatter more than the others -> so many times


def analyse(values: Values, question: Question) -> Analysis:
    """All arms that have values against the baseline, which must have some.

    LEAST_SEEDS common seeds or more: the additive model arm + seed over all arms, with its pooled residual.
    Else as many runs on either side: Welch's test. Else, and where less than LEAST_FREEDOM or no residual at
    all is left, the difference alone. Holm's adjustment covers all that are tested.
    """
    cells = [(name, seed, value) for name, by_seed in values.items() for seed, value in by_seed.items()]
    names, seeds, numbers = zip(*cells, strict=True)
    model, observed = stats.Additive(names, seeds), np.array(numbers, dtype=np.float64)
    others = [name for name in model.arms if name != question.baseline]
    found = {name: _contrast(name, values, question, model, observed) for name in others}
    tested = [name for name in others if found[name].p is not None]
    adjusted = stats.holm(np.array([found[name].p for name in tested], dtype=np.float64))
    for name, p in zip(tested, adjusted, strict=True):
        found[name] = replace(found[name], p_holm=float(p))
        found[name] = replace(found[name], verdict=verdict(found[name], question))
    scatter = {name: model.scatter(observed, name) for name in model.arms}
    wild = {name: ratio for name, (ratio, p) in scatter.items() if p < WILD}
    return Analysis(found, float(model.sd(observed)), model.df, wild)


def verdict(contrast: Contrast, question: Question) -> str:
    """Better or worse: Holm's p is below alpha. Equivalent: the p of the equivalence test is. 'Better, within
    margin': both, so the difference is real and smaller than what matters. Undecided: neither.
    """
    assert contrast.p_holm is not None
    equivalent = contrast.p_equivalence is not None and contrast.p_equivalence < question.alpha
    if contrast.p_holm < question.alpha:
        below, above = ("better", "worse") if question.lower_is_better else ("lower", "higher")
        return (below if contrast.difference < 0 else above) + (", within margin" if equivalent else "")
    if equivalent:
        return "equivalent"
    if question.margin is None:
        return "undecided"
    needed = contrast.seeds_needed or f"more than {stats.MOST_SEEDS}"
    return f"undecided ({contrast.seeds} seeds, power {POWER} needs {needed})"


def counted(n: float, what: str) -> str:
    """'1 seed', '2 seeds', '1 degree of freedom', '2.5 degrees of freedom'."""
    noun, _, rest = what.partition(" ")
    return f"{n:.3g} {noun}{'' if n == 1 else 's'}{' ' if rest else ''}{rest}"


def _contrast(
    name: str, values: Values, question: Question, model: stats.Additive, observed: np.ndarray
) -> Contrast:
    mine, theirs = values[name], values[question.baseline]
    common = [seed for seed in mine if seed in theirs]
    fewest, flips = min(len(mine), len(theirs)), None
    if len(common) >= LEAST_SEEDS or fewest < LEAST_SEEDS:
        method, seeds, arms = "paired", len(common), len(model.arms)
        estimate, sd = model.contrast(observed, name, question.baseline), float(model.sd(observed))
        if seeds >= FLIPS_FROM:
            flips = stats.sign_flips(np.array([mine[seed] - theirs[seed] for seed in common]))
    else:
        method, seeds, arms = "unpaired", fewest, 2
        samples = [np.array(list(side.values())) for side in (mine, theirs)]
        estimate = stats.welch(*samples)
        sd = float(np.sqrt(np.mean([np.var(sample, ddof=1) for sample in samples])))
    if why := _lacking(seeds, method, arms, estimate):
        means = [float(np.mean([side[seed] for seed in common or side])) for side in (mine, theirs)]
        said = "residual 0" if why == NO_RESIDUAL else f"n = {seeds or fewest}"
        return Contrast(
            seeds or fewest, "none", means[0] - means[1], verdict=f"no verdict ({said})", no_verdict=why
        )
    low, high = estimate.interval(1 - question.alpha)
    margin, alpha = question.margin, question.alpha / (len(model.arms) - 1)  # Holm's strictest step
    return Contrast(
        seeds=seeds,
        method=method,
        difference=float(estimate.difference),
        low=float(low),
        high=float(high),
        p=float(estimate.p()),
        p_flips=float(flips.p) if flips else None,
        p_flips_smallest=flips.smallest if flips else None,
        p_equivalence=None if margin is None else float(estimate.p_equivalence(margin)),
        seeds_needed=None if margin is None else _needed(sd, margin, alpha, arms, method == "paired"),
    )


def _needed(sd: float, margin: float, alpha: float, arms: int, paired: bool) -> int | None:
    """The seeds that find a difference of `margin` with POWER, and that allow a verdict at all."""
    found = stats.seeds_needed(sd, margin, alpha, POWER, arms, paired=paired)
    return found and max(found, _least(arms, paired))


def _least(arms: int, paired: bool) -> int:
    """The fewest seeds that leave LEAST_FREEDOM: (arms - 1)(n - 1) if paired, Welch's n - 1 if not."""
    return max(LEAST_SEEDS, 1 + math.ceil(LEAST_FREEDOM / (arms - 1 if paired else 1)))


def _lacking(seeds: int, method: str, arms: int, estimate: stats.Estimate) -> str:
    """Why a contrast allows no verdict; '' where it does."""
    if seeds < LEAST_SEEDS or estimate.df < LEAST_FREEDOM:
        which = "in common with the baseline" if method == "paired" else "on one side"
        left = "" if seeds < LEAST_SEEDS else f" ({counted(float(estimate.df), 'degree of freedom')})"
        needed = _least(arms, method == "paired")
        return f"{counted(seeds, 'seed')} {which}{left}; a verdict among {arms} arms takes {needed}"
    return NO_RESIDUAL if not estimate.se > 0 else ""
