"""Reads outputs/sparsity_payoff, writes results/: each activation with the sparse way where it is the faster
one (auto) against the dense way, seed by seed, and its density by layer; then the arms against `c_dense`, all
runs, layers at the end.
"""

import sys
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ffnlab.analysis import tables
from ffnlab.analysis.conclude import conclude, last, ran
from ffnlab.analysis.costs import ACTIVE, active
from ffnlab.analysis.runs import Run
from ffnlab.analysis.study import Study, script
from ffnlab.analysis.style import BLUE, GREEN, GREY, ORANGE, VERMILION, ordered, style
from ffnlab.analysis.tables import Column, Table

NAMES = {"c": "ReLU², learned C", "relu2": "ReLU²", "relu": "ReLU", "l1": "ReLU², L1"}
COLOURS = dict(zip(NAMES, (BLUE, VERMILION, GREEN, ORANGE), strict=True))
LATE = 0.25  # the last part of a run, when its density has settled
COLUMNS = [
    Column("pair", "activation", left=True),
    Column("seed", "seed"),
    *(Column(key, f"active, {key}", "{:.1%}".format) for key in ("start", "end")),
    Column("sparse_frac", "layers sparse, end", "{:.0%}".format),
    *(Column(f"{way}_s", f"{way}, s", "{:.0f}".format) for way in ("dense", "auto")),
    Column("ratio", "time ratio", "{:.2f}".format),
    Column("late_ratio", f"in the last {LATE:.0%}", "{:.2f}".format),
    *(Column(f"{way}_loss", f"{way}, val/loss", "{:.4f}".format) for way in ("dense", "auto")),
    Column("dense_loss_then", "dense when auto is done", "{:.4f}".format),
]

Pair = tuple[Run, Run]  # of one seed: dense, auto


def pairs(study: Study) -> dict[str, dict[str, Pair]]:
    """activation -> seed -> its two runs, where both are done, with equal threads and what probes saw."""
    found: dict[str, dict[str, Pair]] = {}
    for name in NAMES:
        dense, auto = (study.arms.get(f"{name}_{way}", {}) for way in ("dense", "auto"))
        for seed in sorted({*dense, *auto}, key=str):
            if (why := unfit(dense.get(seed), auto.get(seed))) is None:
                found.setdefault(name, {})[str(seed)] = (dense[seed], auto[seed])
            else:
                print(f"left out {name} of seed {seed}: {why}", file=sys.stderr)
    return found


def unfit(dense: Run | None, auto: Run | None) -> str | None:
    """Why two runs are no pair, None where they are."""
    if dense is None or auto is None:
        return "one of the two is not done"
    if dense.info.get("threads") != auto.info.get("threads"):
        return f"other threads: {dense.info.get('threads')} and {auto.info.get('threads')}"
    return None if dense.keys(ACTIVE) and auto.keys(ACTIVE) else "no probe of activity looked"


def density(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """(steps, active fraction of all layers' neurons) of all probes."""
    layers = [run.series(key) for key in run.keys(ACTIVE)]
    return layers[0][0], np.mean([values for _, values in layers], axis=0)


def seconds(run: Run, steps: np.ndarray) -> np.ndarray:
    """Seconds since the start at which these steps were done; validations and probes before them included."""
    return np.interp(steps, *run.series("time_s"))


def measure(name: str, seed: str, pair: Pair) -> dict[str, object]:
    """A row of the table."""
    dense, auto = pair
    steps = dense.series("time_s")[0]
    ends = np.array([steps[0] + (1 - LATE) * (steps[-1] - steps[0]), steps[-1]])
    times = {way: seconds(run, ends) for way, run in (("dense", dense), ("auto", auto))}
    at, losses = dense.series("val/loss")
    return {
        "pair": NAMES[name],
        "seed": seed,
        "start": density(auto)[1][0],
        "end": active(auto),
        "sparse_frac": last(auto, "perf/sparse_frac"),
        "dense_s": times["dense"][1],
        "auto_s": times["auto"][1],
        "ratio": times["dense"][1] / times["auto"][1],
        "late_ratio": np.diff(times["dense"])[0] / np.diff(times["auto"])[0],
        "dense_loss": last(dense, "val/loss"),
        "auto_loss": last(auto, "val/loss"),
        "dense_loss_then": float(np.interp(times["auto"][1], seconds(dense, at), losses)),
    }


def draw(found: dict[str, dict[str, Pair]]) -> Figure:
    """Density and time ratio over training, and loss over time; a line for each seed."""
    with style():
        picture = Figure(figsize=(10.0, 3.2), layout="constrained")
        left, middle, right = picture.subplots(1, 3)
        for name, by_seed in found.items():
            for i, pair in enumerate(by_seed.values()):
                lines(name, NAMES[name] if i == 0 else None, pair, left, middle, right)
        middle.axhline(1, color=GREY, linewidth=1)
        left.set(title="density", xlabel="step", ylabel="active fraction, mean over layers", ylim=(0, None))
        middle.set(title="time saved", xlabel="step", ylabel="dense / auto, seconds since the start")
        right.set(title="dashed: dense; solid: auto", xlabel="seconds", ylabel="val/loss")
        left.legend()
    return picture


def draw_layers(found: dict[str, dict[str, Pair]]) -> Figure:
    """Density over training, a panel for each activation and a line for each layer, mean over the seeds."""
    with style():
        picture = Figure(figsize=(0.8 + 3.2 * len(found), 3.2), layout="constrained")
        for axes, (name, by_seed) in zip(
            picture.subplots(1, len(found), squeeze=False, sharey=True)[0], found.items(), strict=True
        ):
            runs = [auto for _, auto in by_seed.values()]
            keys = runs[0].keys(ACTIVE)
            for key, colour in zip(keys, ordered(len(keys)), strict=True):
                steps = runs[0].series(key)[0]
                values = np.mean([run.series(key)[1] for run in runs], axis=0)
                axes.plot(steps, values, label=key.split("/")[2], color=colour, linewidth=1)
            axes.set(title=NAMES[name], xlabel="step", ylim=(0, None))
        picture.axes[0].set_ylabel("active fraction")
        picture.axes[-1].legend(ncols=2)
    return picture


def lines(name: str, label: str | None, pair: Pair, left: Axes, middle: Axes, right: Axes) -> None:
    """Those of one pair."""
    dense, auto = pair
    look: dict[str, Any] = {"color": COLOURS[name], "linewidth": 1}
    left.plot(*density(auto), label=label, linestyle="-", **look)
    steps = dense.series("time_s")[0]
    steps = steps[steps > 0]
    middle.plot(steps, seconds(dense, steps) / seconds(auto, steps), linestyle="-", **look)
    for run, line in ((dense, "--"), (auto, "-")):
        at, losses = run.series("val/loss")
        right.plot(seconds(run, at), losses, linestyle=line, **look)


def main(study: Study) -> None:
    found = pairs(study)
    if found:
        rows = [measure(name, seed, pair) for name, own in found.items() for seed, pair in own.items()]
        table = Table("dense and auto", COLUMNS, rows)
        runs = [run for own in found.values() for pair in own.values() for run in pair]
        study.save("payoff.csv", tables.to_csv(table))
        study.save("payoff.md", f"{tables.markdown(table)}\n\n- {ran(runs)}\n")
        study.draw("payoff.png", draw(found), dpi=110)
        study.draw("density.png", draw_layers(found), dpi=110)
    conclude(study, baseline="c_dense")


if __name__ == "__main__":
    script(__file__, __doc__, main)
