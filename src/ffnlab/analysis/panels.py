"""What figures are made of: a titled sheet of panels, curves with labels at their ends, bundles of lines."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ffnlab.analysis.health import ailing
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import ordered, printable

STEP = "step (updates)"
Curve = tuple[np.ndarray, np.ndarray]  # (x, y)


def sheet(
    run: Run,
    what: str,
    *,
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (6.4, 3.8),
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """A picture of `size` inches with rows x columns panels. Its title: what it shows, the run, and, if
    something is, what is wrong with the run.
    """
    picture = Figure(figsize=size)
    problem = ailing(run)
    picture.suptitle(
        "\n".join([what, printable(run.name, 90), *([printable(problem, 90)] if problem else [])])
    )
    return picture, list(picture.subplots(rows, columns, squeeze=False, **options).flat)


def grid(run: Run, what: str, panels: Sequence[str], *, wide: int = 3) -> tuple[Figure, dict[str, Axes]]:
    """A sheet with one titled panel for each name, at most `wide` beside each other."""
    columns = min(wide, len(panels))
    rows = -(-len(panels) // columns)
    size = (max(6.4, 3.4 * columns + 0.6), 2.5 * rows + (1.3 if rows == 1 else 0.8))
    picture, axes = sheet(run, what, rows=rows, columns=columns, size=size)
    for spare in axes[len(panels) :]:
        spare.remove()
    for name, panel in zip(panels, axes, strict=False):
        panel.set_title(name, loc="left")
    return picture, dict(zip(panels, axes, strict=False))


def curves(axes: Axes, lines: Mapping[str, Curve], **limits: Any) -> None:
    """Curves in an order (layers, steps), from dark to light, each labelled at its end; `limits` as those of
    `finish`.
    """
    for (label, (x, y)), colour in zip(lines.items(), ordered(len(lines)), strict=True):
        axes.plot(x, y, color=colour, linestyle="-", label=label, **_dot(y))
    finish(axes, **limits)


def categories(axes: Axes, lines: Mapping[str, Curve], **limits: Any) -> None:
    """Curves that have no order, told apart by colour and dashes, each labelled at its end."""
    for label, (x, y) in lines.items():
        axes.plot(x, y, label=label, **_dot(y))
    finish(axes, **limits)


def finish(axes: Axes, *, bottom: float | None = None, log: bool = False) -> None:
    """Scale and limits of a panel whose curves are drawn, then their labels, which depend on both.

    A logarithmic axis stays linear where there is nothing above 0 to show on it.
    """
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    if log and any((y > 0).any() for y in drawn):
        axes.set_yscale("log", nonpositive="mask")
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    label_ends(axes)


def _dot(y: np.ndarray) -> dict[str, Any]:
    """A curve of one or two points would hardly be seen."""
    return {"marker": "o", "markersize": 3} if np.isfinite(y).sum() < 3 else {}


def label_ends(axes: Axes, size: float = 7) -> None:
    """Writes the label of every curve of a panel beside its last finite point, moved apart where they would
    overlap; where there is no room for all, evenly chosen ones, the first and the last among them.
    """
    ends = []
    for line in axes.get_lines():
        xy = np.column_stack([np.asarray(data, dtype=float) for data in line.get_data()])
        xy = xy[np.isfinite(xy).all(axis=1)]
        if len(xy) and not str(line.get_label()).startswith("_"):
            ends.append((xy[-1], line))
    if not ends:
        return
    figure = axes.figure
    assert isinstance(figure, Figure)
    spec = axes.get_subplotspec()
    rows = spec.get_gridspec().nrows if spec else 1
    gap = (
        size * 1.25 / 72 / (0.72 * figure.get_figheight() / rows)
    )  # of a line of text, in heights of a panel
    ends = [ends[i] for i in spread(len(ends), max(2, int(1 / gap)))]
    axes.autoscale_view()
    flat = axes.transData + axes.transAxes.inverted()
    heights = np.array([flat.transform(xy)[1] for xy, _ in ends])
    order = np.argsort(heights, kind="stable")
    for place, i in zip(apart(heights[order], gap), order, strict=True):
        xy, line = ends[i]
        axes.annotate(
            str(line.get_label()),
            xy=tuple(xy),
            xytext=(1.03, place),
            textcoords="axes fraction",
            color=line.get_color(),
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": line.get_color(), "relpos": (0, 0.5)},
        )


def apart(heights: np.ndarray, gap: float) -> np.ndarray:
    """Rising heights moved as little as is needed for neighbours to be at least `gap` apart (least squares).

    Moved by i * gap, the heights must only not fall: that is an isotonic regression. All stay within [0, 1]
    where there is room.
    """
    blocks: list[tuple[float, int]] = []  # (mean, how many)
    for i, height in enumerate(heights):
        mean, n = float(height) - i * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, m = blocks.pop()
            mean, n = (before * m + mean * n) / (m + n), m + n
        blocks.append((mean, n))
    before = gap * np.arange(len(heights))
    moved = np.repeat([mean for mean, _ in blocks], [n for _, n in blocks]) + before
    return np.maximum(np.minimum(moved, 1 - before[::-1]), before)


def bundle(axes: Axes, x: np.ndarray, ys: np.ndarray, colours: Any, **options: Any) -> None:
    """Many thin lines, the rows of `ys`, as one picture inside the picture (a vector file stays small)."""
    lines = np.empty((len(ys), len(x), 2))
    lines[..., 0], lines[..., 1] = x, ys
    options = {"linewidths": 0.5, "alpha": 0.5, "rasterized": True} | options
    axes.add_collection(LineCollection(list(lines), colors=colours, **options))
    axes.autoscale_view()


def spread(n: int, most: int) -> np.ndarray:
    """At most `most` of 0 .. n-1, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))


def borders(steps: np.ndarray) -> np.ndarray:
    """The edges of cells around rising steps, half-way to their neighbours."""
    middle = (steps[1:] + steps[:-1]) / 2
    before = steps[0] - (middle[0] - steps[0] if len(middle) else 0.5)
    after = 2 * steps[-1] - (middle[-1] if len(middle) else steps[-1] - 0.5)
    return np.concatenate([[before], middle, [after]])
