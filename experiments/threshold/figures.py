"""Reads outputs/threshold, writes results/: the arms against `none`, every run, the layers at the end, and
how much the tokens that activate a neuron have in common (E53).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from ffnlab.analysis import tables
from ffnlab.analysis.conclude import conclude, ran
from ffnlab.analysis.costs import ACTIVE
from ffnlab.analysis.geometry import selected_shift
from ffnlab.analysis.runs import Run
from ffnlab.analysis.study import Study, script
from ffnlab.analysis.tables import Column, Table

SHIFT = r"probe/selection/L\d+/shift"
COLUMNS = [
    Column("arm", "arm", left=True),
    Column("seeds", "seeds"),
    *(Column(f"active_{when}", f"active, {when}", "{:.1%}".format) for when in ("start", "end")),
    Column("expected", "expected at the start", "{:.4f}".format),
    *(
        Column(key, key.replace("_sd", ", sd"), "{:.4f}".format)
        for key in ("start", "start_sd", "end", "end_sd")
    ),
]


def shift(run: Run, at: int) -> float:
    """Root mean square over the layers of what is left of the shift without the part of chance, at the first
    (0) or the last (-1) scan.
    """
    squares = [
        run.series(key)[1][at] ** 2 - run.series(key.replace("/shift", "/chance_shift"))[1][at] ** 2
        for key in run.keys(SHIFT)
    ]
    return math.sqrt(max(0.0, float(np.mean(squares))))


def active(run: Run, at: int) -> float:
    """Mean over the layers of the active fraction at the first or the last look."""
    return float(np.mean([run.series(key)[1][at] for key in run.keys(ACTIVE)]))


def selection(arms: Mapping[str, Sequence[Run]]) -> Table:
    """Arm by arm."""
    rows = []
    for arm, runs in arms.items():
        start, end = ([shift(run, at) for run in runs] for at in (0, -1))
        fraction = float(np.mean([active(run, 0) for run in runs]))
        row: dict[str, object] = {"arm": arm, "seeds": len(runs), "active_start": fraction}
        row |= {"active_end": np.mean([active(run, -1) for run in runs])}
        row |= {"expected": selected_shift(fraction, runs[0].config["model"]["d_model"])}
        for name, values in (("start", start), ("end", end)):
            row |= {
                name: np.mean(values),
                f"{name}_sd": np.std(values, ddof=1) if len(runs) > 1 else math.nan,
            }
        rows.append(row)
    return Table("selection", COLUMNS, rows)


def main(study: Study) -> None:
    looked = {arm: [r for r in runs.values() if r.keys(SHIFT)] for arm, runs in study.arms.items()}
    if looked := {arm: runs for arm, runs in looked.items() if runs}:
        table = selection(looked)
        study.save("selection.csv", tables.to_csv(table))
        study.save("selection.md", f"{tables.markdown(table)}\n\n- {ran(chain(*looked.values()))}\n")
    conclude(study, baseline="none")


if __name__ == "__main__":
    script(__file__, __doc__, main)
