"""Figures of the weights of every neuron."""

import numpy as np

from ffnlab.analysis.choices import ends, lacks
from ffnlab.analysis.figures import Drawing, Missing, Options, figure
from ffnlab.analysis.panels import STEP, bundle, grid, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, BLUE

POINTS = 200  # of a line, at most
QUANTILES = (0.05, 0.5, 0.95)


@figure("Norm of the input weights of every neuron, of its gate too, over the steps (E13).")
def up_norms(run: Run, options: Options) -> Drawing:
    layers = ends(options, run.layers("weights"), lacks("norms of the weights of each neuron", "weights"))
    found = {
        (layer, matrix): norms[f"{matrix}_norm"]
        for matrix in ("up", "gate")
        for layer in layers
        if f"{matrix}_norm" in (norms := run.neurons(f"{layer}/weights"))
    }
    gated = any(matrix == "gate" for _, matrix in found)
    titles = {place: " ".join(place) if gated else place[0] for place in found}
    picture, panels = grid(run, "Norm of the input weights of every neuron", list(titles.values()), wide=2)
    said = []
    for place, record in found.items():
        matrix, title = place[1], titles[place]
        axes, record = panels[title], record[spread(len(record), POINTS)]
        finite = np.isfinite(record.values).any(axis=1)
        if not finite.any():
            raise Missing(f"the norms of {title} are not finite at any step")
        steps, values = record.step.values[finite], record.values[finite]
        bundle(axes, steps, values.T, BLUE, linewidths=0.3, alpha=max(0.03, min(0.5, 60 / values.shape[1])))
        for quantile, style in zip(QUANTILES, (":", "-", ":"), strict=True):
            axes.plot(steps, np.nanquantile(values, quantile, axis=1), color=BLACK, linestyle=style)
        axes.set(xlabel=STEP, ylabel=f"norm of a neuron's row of {matrix}")
        middle = np.nanmedian(values, axis=1)
        said.append(f"{title} {middle[0]:.3f} to {middle[-1]:.3f} ({values.shape[1]:,} neurons)")
    rows = "`up` or `gate`" if gated else "`up`"
    caption = (
        f"Every line is the Euclidean norm of one neuron's row of {rows}, without biases; black: median and, "
        "dotted, 5 % and 95 % quantiles over neurons. Median at the first and at the last look: "
        f"{'; '.join(said)}."
    )
    return Drawing(picture, caption)
