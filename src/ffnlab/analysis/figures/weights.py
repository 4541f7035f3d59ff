"""Figures of the weights of every neuron."""

import numpy as np

from ffnlab.analysis.choices import ends, lacks
from ffnlab.analysis.figures import Drawing, Missing, Options, figure
from ffnlab.analysis.panels import STEP, bundle, grid, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, BLUE

POINTS = 200  # of a line, at most
QUANTILES = (0.05, 0.5, 0.95)


@figure("Norm of the input weights of every neuron over the steps (E13).")
def up_norms(run: Run, options: Options) -> Drawing:
    layers = ends(options, run.layers("weights"), lacks("norms of the weights of each neuron", "weights"))
    picture, panels = grid(run, "Norm of the input weights of every neuron", layers, wide=2)
    said = []
    for layer, axes in panels.items():
        record = run.neurons(f"{layer}/weights")["up_norm"]
        record = record[spread(len(record), POINTS)]
        finite = np.isfinite(record.values).any(axis=1)
        if not finite.any():
            raise Missing(f"the norms of {layer} are not finite at any step")
        steps, values = record.step.values[finite], record.values[finite]
        bundle(axes, steps, values.T, BLUE, linewidths=0.3, alpha=max(0.03, min(0.5, 60 / values.shape[1])))
        for quantile, style in zip(QUANTILES, (":", "-", ":"), strict=True):
            axes.plot(steps, np.nanquantile(values, quantile, axis=1), color=BLACK, linestyle=style)
        axes.set(xlabel=STEP, ylabel="norm of a neuron's row of up")
        middle = np.nanmedian(values, axis=1)
        said.append(f"{layer} {middle[0]:.3f} to {middle[-1]:.3f} ({values.shape[1]:,} neurons)")
    caption = (
        "Every line is the Euclidean norm of one neuron's row of `up`, biases left out; black: median and, "
        "dotted, 5 % and 95 % quantiles over neurons. Median at the first and at the last look: "
        f"{'; '.join(said)}."
    )
    return Drawing(picture, caption)
