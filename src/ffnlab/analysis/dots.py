"""The figure of a comparison: every run a dot, the dots of a seed joined."""

import numpy as np
from matplotlib.figure import Figure

from ffnlab.analysis.compare import Comparison
from ffnlab.analysis.contrasts import counted
from ffnlab.analysis.style import BLUE, GREY, printable, style


def paired_dots(comparison: Comparison) -> Figure:
    """The metric by arm. Dots are runs, a thin line joins those of one seed.

    The diamond of an arm stands at the baseline's mean plus the difference that was tested, with its
    confidence interval, so that it can be read against the baseline (line) and the margin (band).
    """
    with style():
        return _drawn(comparison)


def _drawn(comparison: Comparison) -> Figure:
    names = [name for name in comparison.arms if comparison.values[name]]
    question = comparison.question
    seeds = sorted({seed for name in names for seed in comparison.values[name]})
    picture = Figure(figsize=(max(5.0, 1.2 + 1.1 * len(names)), 3.6), layout="constrained")
    axes = picture.subplots()
    base = float(np.mean(list(comparison.values[question.baseline].values())))
    axes.axhline(base, color=GREY, linewidth=1, linestyle="--", zorder=1)
    if question.margin is not None:
        axes.axhspan(base - question.margin, base + question.margin, color="0.92", zorder=0)
    for seed in seeds:
        points = [(x, comparison.values[name].get(seed, np.nan)) for x, name in enumerate(names)]
        axes.plot(
            *zip(*points, strict=True),
            color="0.7",
            linestyle="-",
            linewidth=0.7,
            marker="o",
            markersize=3,
            zorder=2,
        )
    for x, name in enumerate(names):
        contrast = comparison.analysis.contrasts.get(name)
        mean = base + (contrast.difference if contrast else 0.0)
        axes.plot(x + 0.15, mean, marker="D", markersize=4, color=BLUE, zorder=4)
        if contrast and contrast.low is not None and contrast.high is not None:
            ends = [base + contrast.low, base + contrast.high]
            axes.plot([x + 0.15] * 2, ends, marker="_", markersize=10, color=BLUE, linestyle="-", zorder=3)
    labels = [printable(name) for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=30 if max(map(len, names)) > 10 else 0, ha="right")
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylabel(comparison.metric)
    band = "" if question.margin is None else f"\nband: margin ±{question.margin:g}"
    lost = sum(comparison.diverged.values())
    band += f"\nnot shown: {counted(lost, 'run')} that diverged" if lost else ""
    level = f"{100 * (1 - question.alpha):g} % CI"
    axes.set_title(
        "dots: runs, joined by seed\n"
        f"diamonds: difference from {printable(question.baseline)}, {level}{band}",
        loc="left",
        fontsize=8,
    )
    return picture
