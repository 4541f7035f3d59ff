"""Figures of how often neurons are active: by layer, as a distribution over neurons, neuron by neuron."""

import math

import numpy as np
import xarray as xr

from ffnlab.analysis.choices import by_layer, chosen, ends, lacks
from ffnlab.analysis.figures import Drawing, Options, figure
from ffnlab.analysis.panels import STEP, borders, curves, grid, sheet, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, GREY, ORANGE, SKY, ordered

ACTIVE = "a neuron is active on a token where its post-activation is above 0"
MOMENTS = (0.0, 0.05, 0.2, 0.5, 1.0)  # of the steps, at which distributions are drawn
BARS = 43  # parts of [0, 1], about; 128 tokens give 129 possible fractions = 43 x 3
HEAT_ROWS, HEAT_COLUMNS, HEAT_PANELS = 256, 400, 12


def probed(run: Run) -> str:
    """The size of the probe batch, as the configuration has it."""
    return f"{run.config.get('probe', {}).get('tokens', '?')} probed tokens"


@figure("Active fraction of every layer over the steps (E8, E16).")
def active_frac(run: Run, options: Options) -> Drawing:
    lines = by_layer(run, options, "probe/activity/*/active_frac", lacks("active fractions"))
    picture, (axes,) = sheet(run, "Active fraction by layer")
    axes.set(xlabel=STEP, ylabel="active fraction of (token, neuron) pairs")
    curves(axes, lines, bottom=0)
    first, last = (np.mean([values[i] for _, values in lines.values()]) for i in (0, -1))
    caption = (
        f"Share of the (token, neuron) pairs of each layer that are active, on {probed(run)}; {ACTIVE}. "
        f"Mean over layers: {first:.3f} at the first look, {last:.3f} at the last."
    )
    return Drawing(picture, caption)


@figure("Distribution over neurons of the active fraction, at several steps (E9).")
def active_frac_histogram(run: Run, options: Options) -> Drawing:
    layers = ends(options, run.layers("activity"), lacks("active fraction of each neuron"))
    tokens = int(run.config.get("probe", {}).get("tokens", 128))
    width = max(1, round((tokens + 1) / BARS))
    edges = (np.arange(0, tokens + 1 + width, width) - 0.5) / tokens  # every bar holds as many k/tokens
    picture, panels = grid(run, "Active fraction of single neurons", layers, wide=2)
    spreads = []
    for layer, axes in panels.items():
        record = run.neurons(f"{layer}/activity")["active_frac"]
        steps = record.step.values
        at = np.unique([int(np.abs(steps - part * steps[-1]).argmin()) for part in MOMENTS])
        for i, colour in zip(at, ordered(len(at)), strict=True):
            values = record[i].values
            counts = np.histogram(values[np.isfinite(values)], edges)[0]
            axes.stairs(counts, edges, color=colour, linewidth=1.3, label=f"step {steps[i]}")
        expected = len(values) * binned(binomial(tokens), width)
        axes.stairs(expected, edges, color=BLACK, linestyle=":", label="binomial, p = 1/2")
        axes.set(xlabel="fraction of tokens that activate a neuron", ylabel="neurons per bar")
        spreads.append(f"{layer} {spread_of(record[at[0]])}, {spread_of(record[at[-1]])}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    caption = (
        f"Every neuron counts once: the fraction of {tokens} probed tokens on which it is active; {ACTIVE}. "
        f"Dotted: independent tokens at p = 1/2, sd {0.5 / math.sqrt(tokens):.3f}. "
        f"Mean over neurons: {'; '.join(spreads)}."
    )
    return Drawing(picture, caption)


def spread_of(row: xr.DataArray) -> str:
    """Mean and standard deviation over neurons at one step."""
    values = row.values[np.isfinite(row.values)]
    if not len(values):
        return f"nothing finite at step {int(row.step)}"
    return f"{values.mean():.3f} (sd {values.std():.3f}) at step {int(row.step)}"


def binomial(n: int) -> np.ndarray:
    """P(k of n) at p = 1/2, k = 0 .. n."""
    return np.array([math.comb(n, k) / 2**n for k in range(n + 1)])


def binned(probabilities: np.ndarray, width: int) -> np.ndarray:
    """Sums over `width` neighbours."""
    return np.add.reduceat(probabilities, np.arange(0, len(probabilities), width))


@figure("Share of neurons that are dead, always on, or in between, and the active fraction, by layer.")
def sparsity_by_layer(run: Run, options: Options) -> Drawing:
    missing = lacks("scan for dead and always-on neurons (at every evaluation)")
    dead = by_layer(run, options, "probe/activity/*/dead_frac", missing)
    always = by_layer(run, options, "probe/activity/*/always_on_frac", missing)
    active = by_layer(run, options, "probe/activity/*/active_frac", missing)
    layers = list(dead)
    shares = np.array([[lines[layer][1][-1] for layer in layers] for lines in (dead, always)])
    step = max(int(steps[-1]) for steps, _ in dead.values())
    picture, (axes,) = sheet(run, f"Sparsity by layer at step {step}")
    place, bottom = np.arange(len(layers)), np.zeros(len(layers))
    parts = {"always on": shares[1], "sometimes active": 1 - shares.sum(0), "dead": shares[0]}
    looks = ((ORANGE, "..."), (SKY, ""), (GREY, "///"))
    for (name, share), (colour, hatch) in zip(parts.items(), looks, strict=True):
        axes.bar(
            place, share, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", width=0.7, label=name
        )
        bottom = bottom + share
    fractions = [active[layer][1][-1] if layer in active else np.nan for layer in layers]
    axes.plot(
        place, fractions, color=BLACK, linestyle="none", marker="D", markersize=5, label="active fraction"
    )
    axes.set(
        xlabel="layer",
        ylabel="share of neurons (bars), of pairs (diamonds)",
        ylim=(0, 1),
        xlim=(-0.6, len(layers) - 0.4),
    )
    axes.set_xticks(place, layers)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    scanned = run.config.get("probe", {}).get("scan_tokens", "?")
    caption = (
        f"Bars: share of a layer's neurons that are active on no token (dead), on some, on every one of "
        f"{scanned} scanned validation tokens, at the last scan. Diamonds: share of (token, neuron) pairs "
        f"that are active on {probed(run)}, at the last look; {ACTIVE}."
    )
    return Drawing(picture, caption)


@figure("Active fraction of every neuron over the steps, neurons sorted by their last one.")
def heatmap(run: Run, options: Options) -> Drawing:
    recorded = chosen(options, run.layers("activity"), lacks("active fraction of each neuron"))
    layers = [recorded[i] for i in spread(len(recorded), HEAT_PANELS)]
    picture, panels = grid(run, "Active fraction of every neuron", layers, wide=4)
    image, per_row = None, 1
    for layer, axes in panels.items():
        record = run.neurons(f"{layer}/activity")["active_frac"]
        record = record[spread(len(record), HEAT_COLUMNS)]
        rows, per_row = sorted_rows(record)
        edges = borders(record.step.values)
        heights = np.linspace(0, record.sizes["neuron"], len(rows) + 1)
        image = axes.pcolorfast(edges, heights, rows, vmin=0, vmax=1)
        axes.set_facecolor("0.8")
        axes.grid(visible=False)
        axes.set(xlabel=STEP, ylabel="neurons, sorted")
    assert image is not None
    picture.colorbar(image, ax=list(panels.values()), label="active fraction", pad=0.01, aspect=30)
    caption = (
        f"Fraction of {probed(run)} on which each neuron is active, over the steps; {ACTIVE}. Neurons are "
        f"sorted by their fraction at the last look, the least active at the bottom"
        + (f"; each row is the mean of up to {per_row} neighbours." if per_row > 1 else ".")
    )
    return Drawing(picture, caption)


def sorted_rows(record: xr.DataArray) -> tuple[np.ndarray, int]:
    """(step, neuron) -> rows of neurons, at most HEAT_ROWS, sorted by the last step; neurons in a row."""
    values = record.values
    seen = np.flatnonzero(np.isfinite(values).any(axis=1))
    last = values[seen[-1]] if len(seen) else values[-1]
    values = values[:, np.argsort(last, kind="stable")].T
    per_row = -(-len(values) // HEAT_ROWS)
    starts = np.arange(0, len(values), per_row)
    n = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts, axis=0) / n[:, None], per_row
