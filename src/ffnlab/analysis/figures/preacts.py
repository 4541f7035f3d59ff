"""The whole distribution of the pre-activations as it moves through training."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ffnlab.analysis.choices import ends, lacks, threshold, trace
from ffnlab.analysis.figures import Drawing, Options, figure
from ffnlab.analysis.panels import grid, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, GREY, SKY, VERMILION

FRAMES = 45
BINS, REACH = 160, 4.0  # of a trace: parts, and how many sd beyond the mean of the first step they reach


class History(NamedTuple):
    """Counts of the pre-activations of one layer in fixed bins."""

    steps: np.ndarray  # (S,)
    edges: np.ndarray  # (B+1,)
    density: np.ndarray  # (S, B), per unit of pre-activation; what lies outside the edges counts too
    outside: np.ndarray  # (S,) share that lies outside the edges


@figure("The distribution of all pre-activations of a layer, moving through training (E11).")
def preact_animation(run: Run, options: Options) -> Drawing:
    missing = lacks("histogram or trace of the pre-activations")
    layers = ends(options, sorted({*with_histogram(run), *run.layers("trace")}), missing)
    histories = {layer: history(run, layer) for layer in layers}
    picture, panels = grid(run, "Pre-activations", layers, wide=2)
    shows = [panel(run, axes, layer, histories[layer]) for layer, axes in panels.items()]
    count = max(len(one.steps) for one in histories.values())

    def frame(i: int) -> None:
        for show, one in zip(shows, histories.values(), strict=True):
            show(min(i, len(one.steps) - 1))

    frame(count - 1)
    moved = "; ".join(
        " ".join((layer, *moments(run, layer, int(one.steps[-1])))) for layer, one in histories.items()
    )
    caption = (
        f"Density of the pre-activations (inputs of the activation, before C is subtracted) of all (token, "
        f"neuron) pairs of a layer; grey: the first step; dashed: C, or 0 without a threshold. At the last "
        f"look: {moved}. {max(one.outside.max() for one in histories.values()):.2%} at most lie outside the "
        "bins."
    )
    return Drawing(picture, caption, tuple(partial(frame, i) for i in range(count)))


def panel(run: Run, axes: Any, layer: str, seen: History) -> Callable[[int], None]:
    """Prepares the panel of a layer; what is returned shows the i-th moment in it."""
    axes.stairs(seen.density[0], seen.edges, color=GREY, linewidth=1)
    now = axes.stairs(seen.density[-1], seen.edges, color=SKY, fill=True, alpha=0.7)
    c = threshold(run, layer, seen.steps)
    line = axes.axvline(c[-1], color=VERMILION, linestyle="--", linewidth=1)
    text = axes.text(0.98, 0.97, "", transform=axes.transAxes, ha="right", va="top", fontsize=7, color=BLACK)
    axes.set(xlabel="pre-activation", ylabel="density", ylim=(0, 1.08 * max(seen.density.max(), 1e-9)))
    some = np.flatnonzero(seen.density.max(axis=0))
    if len(some):
        axes.set_xlim(seen.edges[some[0]], seen.edges[some[-1] + 1])

    def show(i: int) -> None:
        now.set_data(seen.density[i])
        line.set_xdata([c[i], c[i]])
        text.set_text("\n".join((f"step {seen.steps[i]}", *moments(run, layer, int(seen.steps[i])))))

    return show


def with_histogram(run: Run) -> list[str]:
    """The layers with a histogram."""
    if "preact" not in run.groups:
        return []
    return [layer for layer in run.layers("preact") if "hist" in run.neurons(f"{layer}/preact")]


def history(run: Run, layer: str) -> History:
    """At most FRAMES moments of a layer, from the histograms where there are some, else from the trace."""
    if layer in with_histogram(run):
        record = run.neurons(f"{layer}/preact")["hist"]
        record = record[spread(len(record), FRAMES)]
        edges = run.neurons("preact")["edge"].values.astype(np.float64)
        counts = record.values.clip(min=0)  # -1: not recorded at that step
        total, inner, edges = counts.sum(axis=1), counts[:, 1:-1], edges[1:-1]  # the outer bins are open
    else:
        record = trace(run, layer)
        record = record[spread(len(record), FRAMES)]
        rows = (row.values[np.isfinite(row.values)].astype(np.float32) for row in record)
        first = next(rows)
        middle, reach = (first.mean(), REACH * first.std() + 1e-6) if len(first) else (0.0, 1.0)
        edges = np.linspace(middle - reach, middle + reach, BINS + 1)
        counted = [(np.histogram(row, edges)[0], len(row)) for row in (first, *rows)]
        inner, total = (np.array(part) for part in zip(*counted, strict=True))
    share = inner / np.maximum(total, 1)[:, None]
    return History(record.step.values, edges, share / np.diff(edges), 1 - share.sum(axis=1))


def moments(run: Run, layer: str, step: int) -> list[str]:
    """Mean, sd and mass just below C of a layer, as the probe counted them nearest to a step."""
    eps = run.config.get("probe", {}).get("preact", {}).get("eps", "eps")
    words = {"mean": "mean {:+.3f}", "sd": "sd {:.3f}", "below_frac": f"{{:.2%}} in [C-{eps}, C)"}
    said = []
    for key, word in words.items():
        steps, values = run.series(f"probe/preact/{layer}/{key}")
        if len(steps):
            said.append(word.format(values[np.abs(steps - step).argmin()]))
    return said
