"""A neuron of a run as geometry has it: exact curves with its activation, its C, its width."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from ffnlab.analysis import geometry
from ffnlab.analysis.figures import Drawing, Missing, Options, figure
from ffnlab.analysis.geometry import of_run
from ffnlab.analysis.panels import sheet
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLACK, BLUE, GREEN, GREY, VERMILION
from ffnlab.errors import UserError

ZONE = 10  # degrees from the boundary within which nearly all inputs lie at the start (E7)
INPUTS = 40  # drawn on the sphere
OUT = np.array([math.cos(math.radians(25)), math.sin(math.radians(25))])  # where the output is drawn to go


def configured(run: Run, *groups: str) -> None:
    """Raises Missing for a directory whose configuration lacks a group, which train.py never leaves out."""
    lacking = [group for group in groups if group not in run.config]
    if lacking:
        raise Missing(f"{run.path / 'config.yaml'} has no {', '.join(lacking)}: no run of train.py wrote it")


def neuron(run: Run, options: Options) -> of_run.Neuron:
    """The run's neuron as the user wants it. Raises Missing where the run's own activation has no curve."""
    configured(run, "model", "ffn", "act", "threshold")
    try:
        return of_run.neuron(run, options.act, options.c, options.layers)
    except UserError as error:
        if options.act is not None:
            raise
        raise Missing(f"{error}; choose another with --act") from None


@figure("A neuron and its inputs on the unit sphere, in two dimensions and in the run's (E1, E6, E14).")
def sphere(run: Run, options: Options) -> Drawing:
    own = neuron(run, options)
    what = f"A neuron on the unit sphere: {own.name}, C = {own.c:.3g}"
    picture, panels = sheet(run, what, columns=2, size=(7.6, 3.9))
    for axes, d, push in zip(panels, (2, own.d), (0.55, 0.2), strict=True):
        draw_sphere(axes, own, d, push)
    panels[0].set_ylabel("along the input direction (1)")
    gate = " The neuron is the gate; its up projection would scale each push." if of_run.gated(run) else ""
    caption = (
        f"{INPUTS} inputs, spread evenly over the sphere in D dimensions and divided by sqrt(D) after "
        f"RMSNorm, seen along the neuron's input direction (orange): their height is the cosine with it. "
        f"Filled: above the threshold (black line) at the height C/(s sqrt(D)); dotted: the equator, where "
        f"C = 0 would lie. Thin arrows: the neuron pushes each input along its output direction (blue) in "
        f"proportion to {own.name}(pre-activation - C), on one scale within a panel, a smaller one in the "
        f"right panel. {own.source}{gate}{of_run.off_sphere(run)}"
    )
    return Drawing(picture, caption)


def draw_sphere(axes: Axes, own: of_run.Neuron, d: int, push: float) -> None:
    """One panel; the largest push is `push` long."""
    radius = own.s * math.sqrt(d)
    above = 100 * geometry.active_frac(own.c, own.s, d)
    axes.set_title(f"D = {d}: {above:.3g} % of inputs above C", loc="left")
    z = geometry.dot_quantile((np.arange(INPUTS) + 0.5) / INPUTS, d)
    x = np.sqrt(1 - z**2) * np.where(np.arange(INPUTS) % 2, 1, -1)
    angle = np.linspace(0, 2 * np.pi, 361)
    axes.plot(np.cos(angle), np.sin(angle), color="0.75", linewidth=0.8, linestyle="-")
    axes.axhline(0, color=GREY, linewidth=0.8, linestyle=":")
    height = own.c / radius
    if abs(height) <= 1.2:
        axes.axhline(height, color=BLACK, linewidth=1.6, linestyle="-", gid="threshold")
        axes.annotate("C", (-1.3, height), xytext=(0, 3), textcoords="offset points", ha="center")
    else:
        side = "above" if height > 0 else "below"
        axes.text(0, math.copysign(1.2, height), f"C lies {side} the sphere", ha="center", va="center")
    arrows: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1}
    post = own.act.value(radius * z - own.c)
    length = push * post / max(float(np.abs(post).max()), 1e-12)
    moved = np.abs(length) > 0.01
    along = length[moved, None] * OUT
    axes.quiver(x[moved], z[moved], along[:, 0], along[:, 1], color=BLUE, alpha=0.55, width=0.004, **arrows)
    filled = np.where(radius * z > own.c, BLUE, "white")
    axes.scatter(x, z, s=14, facecolors=filled, edgecolors=BLUE, linewidths=0.8, zorder=3)
    axes.quiver(0, 0, 0, 1, color=VERMILION, width=0.012, zorder=4, **arrows)
    axes.quiver(0, 0, 0.6 * OUT[0], 0.6 * OUT[1], color=BLUE, width=0.012, zorder=4, **arrows)
    axes.text(-0.06, 0.4, "in", color=VERMILION, ha="right")
    axes.text(0.62 * OUT[0], 0.62 * OUT[1], "out", color=BLUE, va="center")
    axes.set(xlim=(-1.42, 1.72), ylim=(-1.35, 1.4), aspect="equal", xlabel="at right angles to it (1)")


@figure("Output and gradient against an input's angle: ReLU, ReLU^2, gated, the run's (E2, E3, E7, E49).")
def activation_vs_angle(run: Run, options: Options) -> Drawing:
    own = neuron(run, options)
    picture, panels = sheet(
        run, "Output and gradient of a neuron as an input slides from A to B", columns=2, size=(8.0, 4.6)
    )
    t = np.radians(np.linspace(-30, 90, 481))
    for name, (curve, colour, dashes) in angle_curves(t, own, of_run.gated(run)).items():
        largest = float(np.abs(curve.value).max()) or 1.0  # 0: C lies above the sphere
        for axes, y in zip(panels, curve, strict=True):
            axes.plot(np.degrees(t), y / largest, color=colour, linestyle=dashes, label=name)
    panels[0].set_ylabel("output (share of its largest)")
    panels[1].set_ylabel("gradient (largest output per radian)")
    for axes in panels:
        axes.margins(y=0.1)
        mark_angles(axes)
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    near = [
        f"{100 * (1 - geometry.share_beyond(math.radians(ZONE), d)):.6g} % for D = {d}"
        for d in dict.fromkeys((own.d, 768))
    ]
    between = " The neurons of this run lie between both limits." if of_run.gated(run) else ""
    caption = (
        f"Output y and gradient dy/dt of one neuron, exact, for an input on the circle through the neuron's "
        f"direction, t above the plane at right angles to it; every curve is divided by its largest |y|. "
        f"A: at right angles (90 degrees) to the neuron's direction, the boundary for C = 0; B: aligned with "
        f"it (0 degrees). Hatched: within {ZONE} degrees of A, where of inputs spread evenly over the sphere "
        f"{', '.join(near)} lie. Gates and the run's neuron: an aligned input has the pre-activation "
        f"s sqrt(D) = {own.radius:.3g}. A gate softens the gradient at the boundary as far as its up "
        f"pre-activation is small there: wholly when both are tied, not at all on the circle through two "
        f"directions at right angles.{between} {own.source}{of_run.off_sphere(run)}"
    )
    return Drawing(picture, caption)


def angle_curves(
    t: np.ndarray, own: of_run.Neuron, gated: bool
) -> dict[str, tuple[geometry.OnCircle, str, Any]]:
    """Label -> curve, colour, dashes."""
    relu, relu2, silu = (geometry.activation(name) for name in ("relu", "relu2", "silu"))
    limit = geometry.gated_on_circle
    whose = "this run" if own.of_run else "as asked for"
    if gated:  # the angle between gate and up is each neuron's own: both ends of what it can be
        word = f"{whose}, {own.name} gate, C = {own.c:.3g}: limit of up"
        mine = {
            f"{word} at right angles to it": limit(
                t, own.act, between=math.pi / 2, radius=own.radius, c=own.c
            ),
            f"{word} tied to it": limit(t, own.act, between=0.0, radius=own.radius, c=own.c),
        }
    else:
        mine = {
            "silu gate, up at right angles to it": limit(t, silu, between=math.pi / 2, radius=own.radius),
            f"{whose}: {own.name}, C = {own.c:.3g}": geometry.on_circle(
                t, own.act, radius=own.radius, c=own.c
            ),
        }
    looks: tuple[tuple[str, Any], ...] = ((GREEN, "-."), (BLACK, (0, (1, 1))))
    return {
        "relu": (geometry.on_circle(t, relu), BLUE, "-"),
        "relu2, or a relu gate tied to up": (geometry.on_circle(t, relu2), VERMILION, "--"),
        **{
            label: (curve, colour, dashes)
            for (label, curve), (colour, dashes) in zip(mine.items(), looks, strict=True)
        },
    }


def complement(degrees: ArrayLike) -> ArrayLike:
    return np.subtract(90, degrees)


def mark_angles(axes: Axes) -> None:
    """Both angle axes, A and B, and the zone of nearly all inputs at the start."""
    axes.axvspan(-ZONE, ZONE, facecolor="0.93", edgecolor="0.7", hatch="///", linewidth=0, zorder=0)
    for place, name in ((0, "A"), (90, "B")):
        axes.axvline(place, color=GREY, linewidth=0.9, linestyle=":")
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(name, (place, 1), xytext=(-4, -4), ha="right", va="top", weight="bold", **where)
    axes.set(xlim=(-30, 92), xticks=range(-30, 91, 15), xlabel="angle above the equator, C = 0 (degrees)")
    above = axes.secondary_xaxis("top", functions=(complement, complement))
    above.set_xlabel("angle to the neuron's direction (degrees)")
    above.set_ticks(range(0, 121, 15))
