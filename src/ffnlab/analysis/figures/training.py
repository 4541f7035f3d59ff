"""Figures of the training itself: loss, gradients."""

import re

import numpy as np

from ffnlab.analysis.choices import lacks
from ffnlab.analysis.figures import Drawing, Missing, Options, figure
from ffnlab.analysis.panels import STEP, Curve, categories, curves, label_ends, sheet
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import BLUE, GREEN, GREY, VERMILION

WINDOWS = 50  # the smoothed loss is a mean over this part of the rows
IN_LAYER = re.compile(r"(?:blocks\.(\d+)|L(\d{2,}))[./](.+)")


@figure("Training loss, smoothed, and validation loss over the steps.")
def loss(run: Run, options: Options) -> Drawing:
    steps, train = run.series("train/loss")
    at, val = run.series("val/loss")
    if not len(steps) and not len(at):
        raise Missing("the run has no loss yet: it ends before its first step", "a step")
    window = max(1, len(train) // WINDOWS)
    smooth = smoothed(train, window)
    picture, (axes,) = sheet(run, "Loss")
    axes.plot(steps, train, color=GREY, linewidth=0.5, alpha=0.6, label="_raw")
    axes.plot(steps, smooth, color=BLUE, linestyle="-", label=f"training {_last(smooth)}")
    dots = "o" if len(at) < 40 else ""
    axes.plot(
        at, val, color=VERMILION, linestyle="--", marker=dots, markersize=3, label=f"validation {_last(val)}"
    )
    (_, test) = run.series("test/loss")
    if len(test):
        axes.axhline(test[-1], color=GREEN, linestyle=":", label=f"test {_last(test)}")
    axes.set(xlabel=STEP, ylabel="loss (nats per token)")
    label_ends(axes)
    best = f"; lowest validation loss {np.nanmin(val):.4f}" if np.isfinite(val).any() else ""
    raw = "Blue: of the batch of every logged step"
    if window > 1:
        raw = (
            f"Grey: of the batch of every logged step; blue: its mean over {window} logged steps around each"
        )
    caption = f"Loss in nats per token. {raw}; orange, dashed: of the validation windows{best}."
    return Drawing(picture, caption)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a window around each value, of those that are finite."""
    finite, ones = np.isfinite(values), np.ones(window)
    if not len(values):
        return values
    total = np.convolve(np.where(finite, values, 0.0), ones, "same")
    n = np.convolve(finite.astype(float), ones, "same")
    return np.where(n > 0.5, total / np.maximum(n, 1), np.nan)


def _last(values: np.ndarray) -> str:
    return f"{values[np.isfinite(values)][-1]:.3f}" if np.isfinite(values).any() else "(not finite)"


@figure("Gradient norm and update-to-weight ratio of every matrix over the steps (E47, E82).")
def gradients(run: Run, options: Options) -> Drawing:
    norms, ratios = (by_role(run, options, what) for what in ("norm", "update_ratio"))
    if not norms:
        raise lacks("gradients", "gradients")
    ours = [role for role in norms if role.startswith("ffn")]
    rows = [*ours, *(["others"] if len(norms) > len(ours) else [])]
    picture, axes = sheet(
        run,
        "Gradients before clipping, and updates",
        rows=len(rows),
        columns=2,
        size=(8.4, 1.9 * len(rows) + 1.0),
        sharex=True,
    )
    labels = ("gradient norm", "|update| / |weight|")
    for place, panel in enumerate(axes):
        role, found = rows[place // 2], (norms, ratios)[place % 2]
        if role == "others":
            rest = {name: mean_curve(lines) for name, lines in sorted(found.items()) if name not in ours}
            categories(panel, rest, log=True)
        else:
            curves(panel, found.get(role, {}), log=True)
        panel.set_title(role, loc="left")
        panel.set(ylabel=labels[place % 2], xlabel=STEP if place // 2 == len(rows) - 1 else "")
    caption = (
        "Left: Euclidean norm of the gradient of each matrix, before clipping; right: norm of the update "
        "over norm of the weight. Matrices of the FFNs by layer; of the others the mean over layers."
    )
    return Drawing(picture, caption + zero_share(run, options))


def by_role(run: Run, options: Options, what: str) -> dict[str, dict[str, Curve]]:
    """The curves of probe/gradients/<module>/<what>: role -> layer -> curve; role 'ffn.up', layer 'L03'."""
    found: dict[str, dict[str, Curve]] = {}
    for key in run.keys(rf"probe/gradients/.+/{what}"):
        module = key.removeprefix("probe/gradients/").removesuffix(f"/{what}")
        match = IN_LAYER.fullmatch(module)
        layer, role = (f"L{int(match[1] or match[2]):02d}", match[3]) if match else ("", module)
        if layer and options.layers and layer not in options.layers:
            continue
        found.setdefault(role.removesuffix(".weight"), {})[layer] = run.series(key)
    return found


def mean_curve(lines: dict[str, Curve]) -> Curve:
    """The mean of curves over the steps that all of them have."""
    steps = next(iter(lines.values()))[0]
    for at, _ in lines.values():
        steps = np.intersect1d(steps, at)
    return steps, np.mean([values[np.isin(at, steps)] for at, values in lines.values()], axis=0)


def zero_share(run: Run, options: Options) -> str:
    """A sentence on the neurons that get no gradient at all."""
    found = {key.split("/")[2]: run.series(key)[1][-1] for key in run.keys("probe/gradients/[^/]+/zero_frac")}
    shares = [f"{layer} {v:.1%}" for layer, v in found.items() if layer in (options.layers or found)]
    return f" Neurons without any gradient at the last look: {', '.join(shares)}." if shares else ""
