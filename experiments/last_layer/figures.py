"""Reads outputs/last_layer, writes results/: the arms against `skips`, every run, the layers at the end, and
how far the C of the last layer lies from the others.
"""

import numpy as np
from scipy import stats

from ffnlab.analysis import tables
from ffnlab.analysis.compared import p_value
from ffnlab.analysis.conclude import conclude, last
from ffnlab.analysis.contrasts import Contrast, Question, analyse
from ffnlab.analysis.runs import Run
from ffnlab.analysis.study import Study, script
from ffnlab.analysis.tables import Column, Table

BASELINE = "skips"
QUESTION = Question(baseline=BASELINE, alpha=0.05, margin=None, lower_is_better=False)
GAP = [
    Column("arm", "arm", left=True),
    Column("runs", "runs"),
    Column("last", "C, last layer", lambda value: f"{value:.2f}"),
    Column("others", "C, others", lambda value: f"{value:.2f}"),
    Column("gap", "gap", lambda value: f"{value:+.3f}"),
    Column("interval", "95 % CI"),
    Column("change", f"gap - gap of {BASELINE}"),
    Column("p", "p (Holm)"),
]


def thresholds(run: Run) -> list[float]:
    """C of every layer at the end."""
    found = [last(run, key) for key in sorted(run.keys(r"probe/threshold/L\d+/c"))]
    return [c for c in found if c is not None]


def gap(run: Run) -> float:
    """C of the last layer, less the mean of the other layers."""
    *others, end = thresholds(run)
    return end - float(np.mean(others))


def gaps(study: Study) -> Table:
    """The gap of every arm with its t interval, and its difference to that of the baseline, seed by seed."""
    values = {arm: {seed: gap(run) for seed, run in by_seed.items()} for arm, by_seed in study.arms.items()}
    contrasts = analyse(values, QUESTION).contrasts if BASELINE in values else {}
    rows = []
    for arm, by_seed in study.arms.items():
        found = np.array(list(values[arm].values()))
        ends = np.array([thresholds(run)[-1] for run in by_seed.values()])
        row = {"arm": arm, "runs": len(found), "last": ends.mean(), "others": (ends - found).mean()}
        rows.append(row | {"gap": found.mean(), "interval": interval(found), **change(contrasts.get(arm))})
    return Table("how far the C of the last layer lies from the mean of the others", GAP, rows)


def interval(values: np.ndarray) -> str:
    """95 %, by t."""
    if len(values) < 2:
        return "-"
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return f"{low:+.3f} to {high:+.3f}"


def change(contrast: Contrast | None) -> dict[str, str]:
    """The difference to the baseline's gap with its interval, and Holm's p."""
    if contrast is None or contrast.p_holm is None or contrast.low is None or contrast.high is None:
        return {"change": "-", "p": "-"}
    between = f"{contrast.difference:+.3f} ({contrast.low:+.3f} to {contrast.high:+.3f})"
    return {"change": between, "p": p_value(contrast.p_holm)}


def main(study: Study) -> None:
    conclude(study, baseline=BASELINE)
    table = gaps(study)
    study.save("gap.md", f"**{table.title}**\n\n{tables.markdown(table)}\n")


if __name__ == "__main__":
    script(__file__, __doc__, main)
