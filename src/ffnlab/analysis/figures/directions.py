"""Directions in many dimensions: nearly all are at right angles, so that inputs start at the boundary."""

import math

import numpy as np

from ffnlab.analysis import geometry
from ffnlab.analysis.figures import Drawing, Options, figure
from ffnlab.analysis.figures.geometry import ZONE, configured
from ffnlab.analysis.geometry import of_run
from ffnlab.analysis.panels import sheet
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLUE, VERMILION

PAIRS = 10_000


@figure("Dot products of random unit vectors, D = 10, 768 and the run's, with the exact density (E4, E5).")
def dot_products(run: Run, options: Options) -> Drawing:
    configured(run, "model")
    rng, own = np.random.default_rng(0), run.config["model"]["d_model"]
    sizes = sorted({10, 768, own})
    picture, panels = sheet(run, "Dot products of random unit vectors", columns=len(sizes), size=(7.6, 3.4))
    z = np.linspace(-1, 1, 2001)
    for axes, d in zip(panels, sizes, strict=True):
        u, v = (rng.standard_normal((PAIRS, d), dtype=np.float32) for _ in range(2))
        dots = np.einsum("nd,nd->n", u, v) / (np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1))
        sd = geometry.dot_sd(d)
        edges = np.linspace(-4.2 * sd, 4.2 * sd, 43)
        axes.hist(dots, bins=edges[np.abs(edges) <= 1].tolist(), density=True, color="0.75", label="sample")
        axes.plot(z, geometry.dot_density(z, d), color=BLUE, linestyle="-", label="exact density")
        mine = " (this run)" if d == own else ""
        axes.set_title(f"D = {d}{mine}\nsd {dots.std():.3g}, exact {sd:.3g}", loc="left")
        axes.set(xlim=(-1, 1), xlabel="dot product (1)")
    panels[0].set_ylabel("density (per unit of dot product)")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    caption = (
        f"Grey: dot products of {PAIRS:,} pairs of random vectors of length 1 in D dimensions (normal "
        f"numbers, normalised; seed 0), in bins of 0.2 sd. Blue: the exact density "
        f"(1 - z^2)^((D-3)/2) / B(1/2, (D-1)/2). sd: standard deviation, exactly 1/sqrt(D)."
    )
    return Drawing(picture, caption)


@figure("Inputs by angle from a neuron's equator, with their pre-activation before training (E6, E7).")
def equator(run: Run, options: Options) -> Drawing:
    configured(run, "model", "ffn")
    own, init = run.config["model"]["d_model"], run.config["model"]["init"]
    s = of_run.start_sd(run)
    sizes = sorted({2, 10, 768, own})
    picture, panels = sheet(
        run, "Inputs by angle from a neuron's equator", columns=len(sizes), size=(8.4, 3.6)
    )
    edges = np.linspace(-90, 90, 91)
    for axes, d in zip(panels, sizes, strict=True):
        below = np.array([1 - geometry.share_above(math.sin(math.radians(edge)), d) for edge in edges])
        axes.stairs(100 * np.diff(below), edges, fill=True, color=BLUE)
        sd = math.degrees(math.asin(geometry.dot_sd(d)))
        for side in (-sd, sd):
            axes.axvline(side, color=VERMILION, linewidth=1.2, linestyle="--")
        near = 100 * (1 - geometry.share_beyond(math.radians(ZONE), d))
        mine = " (this run)" if d == own else ""
        axes.set_title(f"D = {d}{mine}\n{near:.6g} % within {ZONE}°\nsd {s:.3g} at {sd:.3g}°", loc="left")
        axes.set(xlim=(-90, 90), xticks=range(-90, 91, 45))
        axes.set_xlabel("angle (degrees)")
    panels[0].set_ylabel("inputs (% in each 2 degrees)")
    caption = (
        f"Exact share of inputs, spread evenly over the sphere in D dimensions, by their angle from the "
        f"plane at right angles to a neuron's input direction. Dashed: where the pre-activation is one of "
        f"its standard deviations (sd) from 0, {s:.3g} before training (model.init={init}); there the sine "
        f"of the angle is 1/sqrt(D).{of_run.off_sphere(run)}"
    )
    return Drawing(picture, caption)
