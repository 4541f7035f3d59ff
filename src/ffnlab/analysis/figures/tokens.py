"""The tokens that activate a neuron most, with what stands before them."""

import numpy as np

from ffnlab.analysis.choices import chosen, lacks, neuron, token_text
from ffnlab.analysis.figures import Drawing, Options, figure
from ffnlab.analysis.panels import sheet, spread
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import GREY, VERMILION, literal, visible

RANKS, SCANS = 12, 3
BEFORE = 22  # characters of context


@figure("The tokens that activate a neuron most, in their context, at several scans (E40).")
def top_tokens(run: Run, options: Options) -> Drawing:
    missing = lacks("tokens that activate each neuron most", "top_tokens")
    if "scan" not in run.groups:
        raise missing
    layer = chosen(options, run.layers("top_tokens"), missing)[0]
    index, how = neuron(run, layer, options)
    record = run.neurons(f"{layer}/top_tokens")
    at = spread(record.sizes["step"], SCANS)
    positions, values = (record[name][at, index].values for name in ("position", "value"))
    steps = record.step.values[at]
    ranks = min(RANKS, positions.shape[1])
    size = (3.5 * len(at) + 0.5, 0.23 * ranks + 1.3)
    picture, (axes,) = sheet(run, f"What activates neuron {index} of {layer}", size=size)
    for column in range(len(at)):
        for rank in range(ranks):
            place = int(positions[column, rank])
            if place >= 0:
                before, token = in_context(run, place)
                value = f"{float(values[column, rank]):.2f}"
                write(axes, column, rank, before, token, value)
    axes.grid(visible=False)
    axes.set(
        xlabel="scan: value, text before, token", ylabel="rank", xlim=(0, len(at)), ylim=(ranks - 0.4, -0.6)
    )
    axes.set_xticks(np.arange(len(at)) + 0.68, [f"step {step}" for step in steps])
    axes.set_yticks(range(ranks), [str(rank + 1) for rank in range(ranks)])
    axes.tick_params(length=0)
    stay = len({*positions[0].tolist()} & {*positions[-1].tolist()} - {-1})
    caption = (
        f"The places of the scan at which the post-activation of neuron {index} of {layer} is largest, in "
        f"falling order: its value, the text before, and the token that the neuron sees. Neuron: {how}. "
        f"Of the {positions.shape[1]} places of the scan after step {steps[0]} {stay} are there again after "
        f"step {steps[-1]}."
    )
    return Drawing(picture, caption)


def write(axes, column: int, rank: int, before: str, token: str, value: str) -> None:
    """One cell of the table."""
    options = {"fontsize": 7, "family": "DejaVu Sans Mono", "va": "center", "clip_on": True}
    axes.text(column + 0.15, rank, value, color=GREY, ha="right", **options)
    axes.text(column + 0.67, rank, before, ha="right", **options)
    axes.text(column + 0.68, rank, token, color=VERMILION, weight="bold", ha="left", **options)


def in_context(run: Run, place: int) -> tuple[str, str]:
    """The text before a place of the scan, as far as its window reaches, and its token."""
    scan = run.neurons("scan")["token"]
    window, position = divmod(place, scan.sizes["position"])
    row = scan[window, max(0, position - BEFORE) : position + 1].values
    texts = [run.texts.get(int(token), f" #{token}") for token in row]
    before = visible("".join(texts[:-1]))
    before = before if len(before) <= BEFORE else "…" + before[1 - BEFORE :]
    return literal(before), token_text(run, int(row[-1]))
