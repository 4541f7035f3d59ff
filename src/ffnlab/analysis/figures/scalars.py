"""Figures of what probes record as one number a layer: thresholds, gates, stream, attention, crossings."""

from ffnlab.analysis.choices import by_layer, lacks
from ffnlab.analysis.figures import Drawing, Missing, Options, figure
from ffnlab.analysis.panels import STEP, Curve, categories, curves, grid, sheet
from ffnlab.analysis.runs import LAYER, Run
from ffnlab.analysis.style import ordered


@figure("C of every layer over the steps (E15, E16, E17).")
def threshold(run: Run, options: Options) -> Drawing:
    record = "threshold=learned and probe=default"
    missing = Missing(f"the run holds no threshold C: record one with {record}", record)
    lines = by_layer(run, options, "probe/threshold/*/c", missing)
    picture, (axes,) = sheet(run, "Threshold C by layer")
    spans = 0
    for layer, colour in zip(lines, ordered(len(lines)), strict=True):
        (steps, low), (_, high) = (run.series(f"probe/threshold/{layer}/c_{end}") for end in ("min", "max"))
        if len(steps) and len(low) == len(high):
            spans += 1
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel=STEP, ylabel="C (unit of the pre-activation)")
    curves(axes, lines)
    finals = ", ".join(f"{layer} {values[-1]:+.3f}" for layer, (_, values) in lines.items())
    each = "mean over neurons, shaded from the smallest to the largest; " if spans else ""
    caption = (
        f"C, which a pre-activation must exceed for its neuron to be active; {each}"
        f"at the last look: {finals}."
    )
    return Drawing(picture, caption)


@figure("Skip gates, backout, smear and learned residual scales over the steps.")
def gates(run: Run, options: Options) -> Drawing:
    record = "skip=unet or a part of stream=, and probe=default"
    missing = Missing(f"the run holds no gates: record some with {record}", record)
    found: dict[str, dict[str, Curve]] = {"gates": {}, "residual factors": {}}
    for key in run.keys("probe/gates/.+"):
        name = key.removeprefix("probe/gates/").removesuffix("/value")
        layer = name.partition("/")[0]
        of_layer = LAYER.fullmatch(layer) is not None
        if of_layer and options.layers and layer not in options.layers:
            continue
        found["residual factors" if of_layer else "gates"][name.replace("/", " ")] = run.series(key)
    panels = {name: lines for name, lines in found.items() if lines}
    if not panels:
        raise missing
    picture, axes = grid(run, "Gates of the residual stream", list(panels), wide=2)
    for name, lines in panels.items():
        axes[name].set(xlabel=STEP, ylabel="value in effect")
        categories(axes[name], lines)
    caption = (
        "Values in effect, a sigmoid's after the sigmoid; of a vector the mean over channels. "
        + "; ".join(
            f"{name} {values[-1]:.3f}" for lines in panels.values() for name, (_, values) in lines.items()
        )
    )
    return Drawing(picture, caption + " at the last look.")


@figure("Learned numbers of every layer over the steps: x0 lambdas and others.")
def lambdas(run: Run, options: Options) -> Drawing:
    record = "stream=[x0_lambdas] and probe=default"
    missing = Missing(f"the run holds no lambdas: record some with {record}", record)
    keys = run.keys(rf"probe/lambdas/{LAYER.pattern}/[^/]+")
    names = list(dict.fromkeys(key.rpartition("/")[2] for key in keys))
    if not names:
        raise missing
    picture, axes = grid(run, "Learned numbers by layer", names, wide=2)
    for name, panel in axes.items():
        panel.set(xlabel=STEP, ylabel="value")
        curves(panel, by_layer(run, options, f"probe/lambdas/*/{name}", missing))
    caption = (
        f"Parameters of each layer that are one number, as the forward pass uses them: {', '.join(names)}. "
        "x and x0 weigh the stream and the embedding in x <- x_lambda x + x0_lambda x0."
    )
    return Drawing(picture, caption)


RESIDUAL = {"rms": "rms(x)", "attn_ratio": "rms(attention) / rms(x)", "ffn_ratio": "rms(FFN) / rms(x)"}


@figure("Size of the residual stream, and of what attention and FFN add to it, by layer over the steps.")
def residual(run: Run, options: Options) -> Drawing:
    missing = lacks("size of the residual stream", "residual")
    return panels_by_layer(
        run,
        options,
        "Residual stream",
        {f"probe/residual/*/{key}": label for key, label in RESIDUAL.items()},
        missing,
        "Root mean square over dimensions of the stream x that enters each layer, and of what each branch "
        "adds, over that of the stream that it is added to; mean over the probed positions.",
    )


ATTENTION = {
    "entropy": "entropy (nats)",
    "entropy_frac": "entropy / ln(keys seen)",
    "sink_frac": "weight on the first token",
}


@figure("Entropy of the attention by layer over the steps.")
def attention(run: Run, options: Options) -> Drawing:
    return panels_by_layer(
        run,
        options,
        "Attention",
        {f"probe/attention/*/{key}": label for key, label in ATTENTION.items()},
        lacks("entropy of the attention", "attention"),
        "Entropy of the attention weights of each layer, in nats, as a share of its maximum ln(number of "
        "keys seen), and the weight on the first token of the window; mean over heads and probed positions.",
    )


CROSSINGS = {
    "ever_active_frac": "pairs ever active",
    "flips_mean": "flips per pair",
    "on_off_rate": "on to off per look",
    "off_on_rate": "off to on per look",
    "recovery_rate": "recovered per look",
}


@figure("How many (token, neuron) pairs ever cross the threshold, and how often (E41, E48, E51).")
def crossings(run: Run, options: Options) -> Drawing:
    missing = lacks("crossings of the threshold", "crossings")
    ever = by_layer(run, options, "probe/crossings/*/ever_active_frac", missing)
    shares = ", ".join(f"{layer} {values[-1]:.1%}" for layer, (_, values) in ever.items())
    return panels_by_layer(
        run,
        options,
        "Crossings of the threshold",
        {f"probe/crossings/*/{key}": label for key, label in CROSSINGS.items()},
        missing,
        "A pair of a probed token and a neuron is on where its pre-activation exceeds C (0 without a "
        "threshold). Share of pairs on at this look or an earlier one; changes per pair since the start; of "
        "pairs on (off) at the last look, the share off (on) now; of those on before and off at the last "
        f"look, the share on again. What happens between two looks is not seen. Ever active: {shares}.",
    )


def panels_by_layer(
    run: Run, options: Options, what: str, metrics: dict[str, str], missing: Missing, caption: str
) -> Drawing:
    """One panel for each metric that was recorded, with a curve for each layer."""
    recorded = {
        metric: label for metric, label in metrics.items() if run.keys(LAYER.pattern.join(metric.split("*")))
    }
    if not recorded:
        raise missing
    picture, axes = grid(run, what, list(recorded.values()), wide=3)
    for metric, label in recorded.items():
        axes[label].set(xlabel=STEP, ylabel=label)
        axes[label].set_title("", loc="left")
        curves(axes[label], by_layer(run, options, metric, missing))
    return Drawing(picture, caption)
