"""What most studies end with: the comparison of their arms, every run, and the layers at the end."""

import math
import sys
from collections.abc import Iterable

import numpy as np

from ffnlab.analysis import compared, tables
from ffnlab.analysis.arms import Seed
from ffnlab.analysis.compare import Comparison, compare
from ffnlab.analysis.dots import paired_dots
from ffnlab.analysis.fairness import tokens_per_step
from ffnlab.analysis.runs import Run
from ffnlab.analysis.study import Study
from ffnlab.analysis.tables import Column, Table

LAYER_VALUES = {"active_frac": "probe/activity/{}/active_frac", "c": "probe/threshold/{}/c"}
DPI = 110


def conclude(study: Study, baseline: str) -> Comparison:
    """Write {comparison.md, runs.csv, layers.csv, dots.png} of a study; returns the comparison.

    Where the runs of `baseline` are not there yet, the first arm stands in for it, which is said.
    """
    known = baseline in study.arms
    comparison = compare([run.path for run in study.runs], baseline=baseline if known else None)
    if not known:
        stands_in = comparison.question.baseline
        print(f"no run of the arm '{baseline}' yet: compared with '{stands_in}'", file=sys.stderr)
    study.save("comparison.md", markdown(comparison, study.arms))
    study.save("runs.csv", tables.to_csv(run_table(comparison, study.arms)))
    study.save("layers.csv", tables.to_csv(layer_table(study.arms)))
    study.draw("dots.png", paired_dots(comparison), DPI)
    return comparison


def markdown(comparison: Comparison, runs: dict[str, dict[Seed, Run]]) -> str:
    """The tables of a comparison, how to read them, and what was run."""
    parts = [
        f"**{table.title}**\n\n{tables.markdown(table)}"
        for table in (compared.effects(comparison), compared.spent(comparison))
    ]
    notes = (
        comparison.warnings
        + compared.wild(comparison)
        + compared.left_out(comparison)
        + compared.notes(comparison)
    )
    notes.append(ran(run for arm in runs.values() for run in arm.values()))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def ran(runs: Iterable[Run]) -> str:
    """Sizes, commits, machines, precisions and threads of runs, in one sentence."""
    runs = list(runs)
    infos = [run.info for run in runs]

    def values(of: list[object]) -> str:
        return ", ".join(sorted({str(value) for value in of if value}))

    commits = values([(info.get("git") or {}).get("commit", "")[:10] for info in infos])
    devices = values([info.get("device", {}).get("name") for info in infos])
    precisions = values([info.get("precision") for info in infos])
    threads = values([info.get("threads") for info in infos])
    sizes = values(
        [f"{run.config['train']['steps']} steps of {tokens_per_step(run):,} tokens" for run in runs]
    )
    return f"{len(infos)} runs of {sizes}; commit {commits}; {devices}; {precisions}; threads {threads}."


def run_table(comparison: Comparison, runs: dict[str, dict[Seed, Run]]) -> Table:
    """One row for each run that has a value."""
    rows = [
        {"arm": name, "seed": str(seed), "value": value, "commit": commit(runs[name][seed])}
        for name, values in comparison.values.items()
        for seed, value in values.items()
    ]
    columns = [Column(key, key) for key in ("arm", "seed", "value", "commit")]
    return Table(comparison.metric, columns, rows)


def commit(run: Run) -> str:
    return (run.info.get("git") or {}).get("commit", "")[:10]


def layer_table(runs: dict[str, dict[Seed, Run]]) -> Table:
    """Arm x layer: mean and standard deviation over seeds of the last active fraction and C."""
    rows = []
    for name, by_seed in runs.items():
        labels = sorted(
            {key.split("/")[2] for run in by_seed.values() for key in run.keys("probe/activity/L.+")}
        )
        for label in labels:
            row: dict[str, object] = {"arm": name, "layer": label, "seeds": len(by_seed)}
            for key, metric in LAYER_VALUES.items():
                ends = [last(run, metric.format(label)) for run in by_seed.values()]
                known = [value for value in ends if value is not None]
                row[key] = float(np.mean(known)) if known else math.nan
                row[f"{key}_sd"] = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
            rows.append(row)
    keys = ["arm", "layer", "seeds", *(k for key in LAYER_VALUES for k in (key, f"{key}_sd"))]
    return Table("layers at the end", [Column(key, key) for key in keys], rows)


def last(run: Run, metric: str) -> float | None:
    """The last value of a metric, None where it was not recorded."""
    _, values = run.series(metric)
    return float(values[-1]) if len(values) else None
