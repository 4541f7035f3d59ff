"""What the tables of `ffnlab sparsify` and `ffnlab ablate` hold: the loss of a run with fewer neurons."""

from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ffnlab.analysis.figures import Drawing, Missing, Options, figure
from ffnlab.analysis.panels import grid, sheet
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, BLUE, GREEN, GREY, VERMILION, ordered, printable
from ffnlab.record.table import read_table

LOOKS = {"c": (BLUE, "-", "o"), "eps": (GREEN, "--", "s"), "top_k": (VERMILION, ":", "^")}
WAYS = {"c": "a higher C", "eps": "small ones to 0", "top_k": "the largest of each token"}
KNEE = 0.01  # nats: what a sparser run may lose
RISE = "rise of the validation loss (nats)"


def table(run: Run, name: str) -> list[dict[str, Any]]:
    """The rows of RUN/NAME.csv; Missing, with the command that writes it, where there is none."""
    file = run.path / f"{name}.csv"
    record = f"ffnlab {name} RUN"
    if not file.exists():
        raise Missing(f"the run has no {file.name}: write it with {record}", record)
    return read_table(file)


@figure("Validation loss against active fraction, of all layers and of each alone.")
def sparsify(run: Run, options: Options) -> Drawing:
    rows = table(run, "sparsify")
    methods = [method for method in LOOKS if any(row["method"] == method for row in rows)]
    alone = sorted({row["layer"] for row in rows} - {"all"})
    layers = [layer for layer in options.layers or alone if layer in alone]
    picture, axes = grid(run, "Loss with fewer active neurons", ["all layers", "one layer"], wide=2)
    for method in methods:
        colour, line, marker = LOOKS[method]
        x, y, error = curve(rows, method, "all")
        axes["all layers"].errorbar(
            x, y, error, color=colour, linestyle=line, marker=marker, markersize=3, label=WAYS[method]
        )
    for layer, colour in zip(layers, ordered(len(layers)), strict=True):
        x, y, _ = curve(rows, methods[0] if methods else "c", layer)
        axes["one layer"].plot(x, y, color=colour, linestyle="-", marker="o", markersize=2, label=layer)
    for panel in axes.values():
        panel.set(xscale="log", xlabel="active fraction of (token, neuron) pairs", ylabel=RISE)
        panel.margins(x=0.05)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.axhline(0, color=BLACK, linewidth=0.6)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7)
    axes["all layers"].axhline(KNEE, color=GREY, linewidth=0.8, linestyle=":")
    knees = ", ".join(at_knee(rows, method) for method in methods)
    dense = next(row for row in rows if row["method"] == "none" and row["layer"] == "all")
    caption = (
        f"Unchanged, the run has a loss of {dense['loss']:.4f} nats with {dense['active_frac']:.1%} of the "
        "(token, neuron) pairs active. Bars: standard error of the rise over batches of the same windows. "
        f"Dotted: {KNEE:g} nats; up to there the active fraction falls to: {knees or 'nothing tried'}. "
        f"Right: {WAYS[methods[0]] if methods else 'nothing'} in one layer, the others as they are."
    )
    return Drawing(picture, caption)


def at_knee(rows: list[dict[str, Any]], method: str) -> str:
    """A way, its knee, and what a sparse kernel could skip there (tables of before lack that)."""
    frac = knee(curve(rows, method, "all"))
    own = (row for row in rows if row["layer"] == "all" and row["method"] in ("none", method))
    share = next(row for row in own if row["active_frac"] == frac).get("skippable_frac")
    more = "" if share is None else f" (skippable: at most {share:.1%} of the FLOPs of training)"
    return f"{WAYS[method]} {frac:.1%}{more}"


def curve(
    rows: list[dict[str, Any]], method: str, layer: str
) -> tuple[list[float], list[float], list[float]]:
    """Active fraction, rise and its standard error, from the unchanged run to the sparsest."""
    own = [row for row in rows if row["layer"] == layer and row["method"] in ("none", method)]
    own.sort(key=lambda row: -row["active_frac"])
    x, y, error = ([row[key] for row in own] for key in ("active_frac", "rise", "rise_se"))
    return x, y, [e if e == e else 0.0 for e in error]  # one batch has no standard error


def knee(line: tuple[list[float], list[float], list[float]]) -> float:
    """The smallest active fraction before the loss first rises by more than KNEE."""
    reached = line[0][0]
    for frac, rise in zip(line[0], line[1], strict=True):
        if not rise <= KNEE:
            break
        reached = frac
    return reached


@figure("Validation loss without one layer's FFN, without the never active, the least and the most active.")
def ablate(run: Run, options: Options) -> Drawing:
    rows = [row for row in table(run, "ablate") if row["what"] != "nothing"]
    picture, (axes,) = sheet(run, "Loss without some neurons")
    names = [printable(f"{row['what']}, {row['layer']} ({row['neurons']:,.0f})") for row in rows]
    places = range(len(rows))[::-1]
    error = [row["rise_se"] if row["rise_se"] == row["rise_se"] else 0.0 for row in rows]
    axes.barh(list(places), [row["rise"] for row in rows], xerr=error, color=BLUE, height=0.7)
    axes.axvline(0, color=BLACK, linewidth=0.6)
    axes.set_yticks(list(places), names, fontsize=7)
    axes.margins(x=0.05)
    axes.set(xlabel=RISE, ylabel="taken out, layers (neurons)")
    mode = rows[0].get("instead") if rows else None
    put = {"zero": "0", "mean": "their mean over the scan"}.get(
        str(mode), "0 or their mean (it is not on record)"
    )
    caption = (
        f"Rise of the validation loss when neurons, or a whole FFN, put out {put}. "
        "Bars: standard error over batches of the same windows."
    )
    return Drawing(picture, caption)
