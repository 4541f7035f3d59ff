"""Figures of single neurons on single tokens: what the probe `trace` recorded."""

import numpy as np
import xarray as xr

from ffnlab.analysis.choices import ends, lacks, neuron, threshold, token_names, tokens, trace
from ffnlab.analysis.figures import Drawing, Options, figure
from ffnlab.analysis.panels import STEP, bundle, curves, grid, sheet, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, BLUE, GREY, VERMILION

TOKENS = 10  # lines of neuron_trace, as in the source
EXTREMES = 100  # lines of lineage, at either end
POINTS = 400  # of a line, at most

PREACT = "pre-activation"


@figure("Pre-activation of one neuron on chosen tokens over the steps (E10).")
def neuron_trace(run: Run, options: Options) -> Drawing:
    layers = ends(options, run.layers("trace"), lacks("pre-activation of each token", "trace"))
    layer = layers[0]
    record, (index, how) = trace(run, layer), neuron(run, layer, options)
    values = record[:, :, index].values.astype(np.float32)
    order = np.argsort(values[-1], kind="stable")
    order = order[np.isfinite(values[:, order]).any(axis=0)]
    places = tokens(run, options, values.shape[1])
    picked = np.array(places) if places else order[spread(len(order), TOKENS)]
    steps = record.step.values
    picture, (axes,) = sheet(run, f"Neuron {index} of {layer} on {len(picked)} tokens", size=(7.4, 4.2))
    c = threshold(run, layer, steps, index)
    axes.plot(steps, c, color=BLACK, linestyle="--", linewidth=1, label="_c")
    axes.set(xlabel=STEP, ylabel=PREACT)
    names = token_names(run, [int(place) for place in picked])
    keep = spread(len(steps), POINTS)
    curves(axes, {name: (steps[keep], values[keep, k]) for name, k in zip(names, picked, strict=True)})
    chose = "as asked for" if places else "evenly by their rank at the last step"
    caption = (
        f"Input of the activation of neuron {index} of {layer}, before C is subtracted; dashed: C (0 without "
        f"a threshold), above which it is active. Neuron: {how}. Tokens (text, validation window:position): "
        f"{chose}."
    )
    return Drawing(picture, caption)


@figure("One neuron of the first and of the last layer, every line a token (E18, E19).")
def token_lines(run: Run, options: Options) -> Drawing:
    layers = ends(options, run.layers("trace"), lacks("pre-activation of each token", "trace"))
    picks = {layer: neuron(run, layer, options) for layer in layers}
    titles = {layer: f"{layer}, neuron {pick.index}" for layer, pick in picks.items()}
    picture, panels = grid(run, "Every line a token", list(titles.values()), wide=2)
    said = []
    for layer, (index, how) in picks.items():
        axes, record = panels[titles[layer]], trace(run, layer)
        values, steps = record[:, :, index].values.astype(np.float32).T, record.step.values
        c = threshold(run, layer, steps, index)
        on = values > c
        last = on[:, -1]
        keep = spread(len(steps), POINTS)
        for which, colour, style in ((~last, BLUE, "solid"), (last, VERMILION, "dashed")):
            bundle(axes, steps[keep], values[which][:, keep], colour, linestyles=style, linewidths=0.7)
        axes.plot(steps, c, color=BLACK, linewidth=1.2, linestyle="-")
        axes.set(xlabel=STEP, ylabel=PREACT)
        said.append(
            f"{layer}: {how}; {on.any(axis=1).mean():.0%} of {len(values)} tokens above C at least once"
        )
    caption = (
        "Input of the activation, before C is subtracted, on every probed token; black: C (0 without a "
        "threshold). Orange, dashed: tokens above it at the last step; blue: below. " + ". ".join(said) + "."
    )
    return Drawing(picture, caption)


@figure("The largest and the smallest pre-activations of the last step, tracked back (E12).")
def lineage(run: Run, options: Options) -> Drawing:
    layer = ends(options, run.layers("trace"), lacks("pre-activation of each token", "trace"))[0]
    record = trace(run, layer)
    steps = record.step.values
    final = record[-1].values.astype(np.float32).ravel()
    known = np.flatnonzero(np.isfinite(final))
    order = known[np.argsort(final[known], kind="stable")]
    n = min(EXTREMES, len(order) // 2)
    pairs = np.concatenate([order[:n], order[len(order) - n :]])
    values = follow(record, pairs)
    low, high = values[:n], values[n:]
    picture, (lines, start) = sheet(
        run, f"Extreme pre-activations of {layer}", columns=2, size=(8.4, 3.8), width_ratios=(2.6, 1)
    )
    keep = spread(len(steps), POINTS)
    for rows, colour, style in ((low, BLUE, "solid"), (high, VERMILION, "dashed")):
        bundle(lines, steps[keep], rows[:, keep], colour, linestyles=style)
    lines.axhline(0, color=BLACK, linewidth=1, linestyle="-")
    lines.set(xlabel=STEP, ylabel=PREACT)
    everything = record[0].values.astype(np.float32).ravel()
    looks = (
        (everything, GREY, "-", "all"),
        (low[:, 0], BLUE, "-", f"lowest {n}"),
        (high[:, 0], VERMILION, "--", f"highest {n}"),
    )
    edges = np.histogram_bin_edges(everything[np.isfinite(everything)], 40)
    for begun, colour, style, name in looks:
        counts = np.histogram(begun[np.isfinite(begun)], edges)[0]
        density = counts / np.diff(edges) / max(counts.sum(), 1)
        start.stairs(density, edges, color=colour, linestyle=style, label=name)
    start.set(xlabel=f"pre-activation at step {steps[0]}", ylabel="density")
    start.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), handlelength=1.2)
    return Drawing(picture, lineage_caption(layer, int(steps[0]), int(steps[-1]), low, high))


def lineage_caption(layer: str, first: int, last: int, low: np.ndarray, high: np.ndarray) -> str:
    """What became of the extremes: where they began, and how much they differ among each other."""
    began_low, began_high = (rows[:, 0][np.isfinite(rows[:, 0])] for rows in (low, high))
    if not (len(began_low) and len(began_high)):
        return f"Too few pre-activations of {layer} are finite for a lineage."
    ratio = high[:, -1].std() / max(low[:, -1].std(), 1e-9)
    return (
        f"The {len(high)} (token, neuron) pairs of {layer} with the highest pre-activations at step {last} "
        f"(orange, dashed) and the {len(low)} with the lowest (blue), over all steps and, right, where they "
        f"began. P(start > 0 | highest) = {np.mean(began_high > 0):.2f}, "
        f"P(start > 0 | lowest) = {np.mean(began_low > 0):.2f} at step {first}; "
        f"sd of the highest over sd of the lowest at step {last}: {ratio:.2f}."
    )


def follow(record: xr.DataArray, pairs: np.ndarray) -> np.ndarray:
    """(step, token, neuron) -> the values of flattened (token, neuron) pairs, (pair, step), chunk by "
    "chunk."""
    length = (record.encoding.get("chunks") or (64,))[0]
    parts = [
        record[first : first + length].values.reshape(-1, record.shape[1] * record.shape[2])[:, pairs]
        for first in range(0, len(record), length)
    ]
    return np.concatenate(parts).T.astype(np.float32)
