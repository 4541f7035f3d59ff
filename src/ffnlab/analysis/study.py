"""What the `figures.py` of a study writes: the comparison of its arms, and its layers at the end."""

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from ffnlab.analysis import compared, tables
from ffnlab.analysis.arms import Seed, find, group
from ffnlab.analysis.compare import Comparison, compare
from ffnlab.analysis.dots import paired_dots
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import style
from ffnlab.analysis.tables import Column, Table
from ffnlab.errors import UserError, report
from ffnlab.record.files import write_atomic

LAYER_VALUES = {"active_frac": "probe/activity/{}/active_frac", "c": "probe/threshold/{}/c"}


def runs_of(study: Path, outputs: Path = Path("outputs")) -> dict[str, dict[Seed, Run]]:
    """arm -> seed -> finished run of a study, which is named as its folder."""
    folder = outputs / study.resolve().name
    if not folder.is_dir():
        raise UserError(f"{folder} is not there: python train.py experiment={study.resolve().name}")
    done = [run for run in find([folder]) if run.info.get("status") == "done"]
    return {arm.name: dict(arm.runs) for arm in group(done, ())}


def script(main: Callable[[], object]) -> None:
    """Run a study's `main`; what a user can mend is one message and exit code 1."""
    try:
        main()
    except UserError as error:
        sys.exit(report(error.problems, Path(sys.argv[0]).name))


def conclude(study: Path, baseline: str, outputs: Path = Path("outputs")) -> Comparison:
    """Write results/{comparison.md, runs.csv, dots.png, layers.csv} of a study; returns the comparison."""
    runs = runs_of(study, outputs)
    comparison = compare([outputs / study.resolve().name], baseline=baseline)
    save(study, "comparison.md", markdown(comparison, runs))
    save(study, "runs.csv", tables.to_csv(run_table(comparison, runs)))
    save(study, "layers.csv", tables.to_csv(layer_table(runs)))
    with style():
        paired_dots(comparison).savefig(study / "results/dots.png", dpi=110)
    return comparison


def save(study: Path, name: str, text: str) -> None:
    """Write results/NAME of a study."""
    results = study / "results"
    results.mkdir(exist_ok=True)
    write_atomic(results / name, text)


def markdown(comparison: Comparison, runs: dict[str, dict[Seed, Run]]) -> str:
    """The tables of a comparison, how to read them, and what was run."""
    parts = [
        f"**{table.title}**\n\n{tables.markdown(table)}"
        for table in (compared.effects(comparison), compared.spent(comparison))
    ]
    notes = comparison.warnings + compared.left_out(comparison) + compared.notes(comparison)
    notes.append(ran(run for arm in runs.values() for run in arm.values()))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def ran(runs: Iterable[Run]) -> str:
    """Commits, machines, precisions and threads of runs, in one sentence."""
    infos = [run.info for run in runs]

    def values(of: list[object]) -> str:
        return ", ".join(sorted({str(value) for value in of if value}))

    commits = values([(info.get("git") or {}).get("commit", "")[:10] for info in infos])
    devices = values([info.get("device", {}).get("name") for info in infos])
    precisions = values([info.get("precision") for info in infos])
    threads = values([info.get("threads") for info in infos])
    return f"{len(infos)} runs; commit {commits}; {devices}; {precisions}; threads {threads}."


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
