"""Reads outputs/relu2_dynamics, writes results/observations.{csv,md} and the figures of the first seed.

Each row is one of the source's observations, as a number of our own runs: by seed, and over the seeds.
"""

import numpy as np

from ffnlab.analysis import tables
from ffnlab.analysis.conclude import ran
from ffnlab.analysis.figures import Options, entries
from ffnlab.analysis.runs import Run
from ffnlab.analysis.study import Study, script
from ffnlab.analysis.tables import Column, Table

FIGURES = ("active_frac", "active_frac_histogram", "neuron_trace", "lineage", "crossings", "up_norms")
DPI = 70
EXTREME = 100  # as in the source: the top and bottom 100


def at(run: Run, metric: str, step: int) -> float:
    """A metric at the recorded step nearest to `step`."""
    steps, values = run.series(metric)
    return float(values[np.abs(steps - step).argmin()])


def neurons_at(run: Run, group: str, name: str, step: int) -> np.ndarray:
    """A per-neuron array at the recorded step nearest to `step`."""
    return run.neurons(group)[name].sel(step=step, method="nearest").values


def lineage(run: Run, label: str) -> tuple[float, float, float]:
    """P(started above 0 | among the highest at the end), P(started below | lowest), ratio of spreads."""
    trace = run.neurons(f"{label}/trace")["preact"]
    start, end = (trace.isel(step=place).values.astype(np.float32).ravel() for place in (0, -1))
    order = np.argsort(end)
    high, low = start[order[-EXTREME:]], start[order[:EXTREME]]
    return float((high > 0).mean()), float((low < 0).mean()), float(high.std() / low.std())


def observe(run: Run) -> dict[str, float]:
    """All observations of one run."""
    layers = run.layers("activity")
    first, end = layers[0], layers[-1]
    last_step = int(run.series("train/loss")[0][-1])
    active = "probe/activity/{}/active_frac".format
    found = {f"active fraction, {first}, step {step}": at(run, active(first), step) for step in (0, 110)}
    found |= {f"active fraction, {label}, end": at(run, active(label), last_step) for label in layers}
    found["loss at step 110"] = at(run, "train/loss", 110)
    found["val/loss, end"] = float(run.series("val/loss")[1][-1])
    for step in (0, 110, last_step):
        spread = neurons_at(run, f"{first}/activity", "active_frac", step).std()
        found[f"sd over neurons of the active fraction, {first}, step {step}"] = float(spread)
        found[f"mean pre-activation, {first}, step {step}"] = at(run, f"probe/preact/{first}/mean", step)
        found[f"sd of pre-activations, {first}, step {step}"] = at(run, f"probe/preact/{first}/sd", step)
        norms = neurons_at(run, f"{first}/weights", "up_norm", step)
        found[f"mean norm of input weights, {first}, step {step}"] = float(norms.mean())
        cosine = neurons_at(run, f"{first}/weights", "up_cosine", step)
        found[f"mean |cos| between input weights, {first}, step {step}"] = float(cosine.mean())
        for side in ("below", "above"):
            key = f"probe/preact/{first}/{side}_frac"
            found[f"share of pairs just {side} the threshold, {first}, step {step}"] = at(run, key, step)
    for label in (first, end):
        high, low, ratio = lineage(run, label)
        found[f"highest {EXTREME} at the end that started above 0, {label}"] = high
        found[f"lowest {EXTREME} at the end that started below 0, {label}"] = low
        found[f"sd of the highest over sd of the lowest at the start, {label}"] = ratio
        ever = run.neurons(f"{label}/crossings")["ever_active_frac"].isel(step=-1).values
        flips = run.neurons(f"{label}/crossings")["flips_mean"].isel(step=-1).values
        found[f"pairs ever active, {label}"] = float(ever.mean())
        found[f"crossings per pair, {label}"] = float(flips.mean())
    return found


def main(study: Study) -> None:
    by_seed = next(iter(study.arms.values()))  # the study has one arm
    seen = {str(seed): observe(run) for seed, run in by_seed.items()}
    names = next(iter(seen.values()))
    rows = []
    for name in names:
        values = np.array([observed[name] for observed in seen.values()])
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        rows.append(
            {"what": name, "mean": float(values.mean()), "sd": sd, **{s: o[name] for s, o in seen.items()}}
        )
    write = "{:.4g}".format
    columns = [Column("what", "what", left=True), Column("mean", "mean", write), Column("sd", "sd", write)]
    columns += [Column(seed, f"seed {seed}", write) for seed in seen]
    table = Table("observations", columns, rows)
    study.save("observations.csv", tables.to_csv(table))
    text = f"{tables.markdown(table)}\n\n- {ran(by_seed.values())}\n"
    study.save("observations.md", text)
    run = next(iter(by_seed.values()))
    for name in FIGURES:
        study.draw(f"{name}.png", entries()[name].draw(run, Options()).picture, DPI)


if __name__ == "__main__":
    script(__file__, __doc__, main)
