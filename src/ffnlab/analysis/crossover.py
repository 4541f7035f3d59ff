"""The figure of `ffnlab bench sparse --csv`: how much faster the sparse way is, by density."""

from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from ffnlab.analysis.style import GREY, ordered, style

SECTIONS = {"ffn": "whole FFN, forward and backward", "token": "one token forward"}


def crossover(rows: Iterable[Mapping[str, str]]) -> Figure:
    """Speed-up (dense time over sparse time, same precision) against density, one panel for the whole FFN and
    one for a single token; dashed: the bound of the operations or bytes that are left; below 1 dense is
    faster.
    """
    rows = list(rows)
    densities = sorted({float(row["density"]) for row in rows})
    cases = sorted({(row["precision"], row["shape"]) for row in rows}, reverse=True)
    with style():
        picture = Figure(figsize=(8.0, 3.4), layout="constrained")
        panels = picture.subplots(1, len(SECTIONS), squeeze=False)[0]
        for axes, (section, title) in zip(panels, SECTIONS.items(), strict=True):
            for colour, (precision, shape) in zip(ordered(len(cases)), cases, strict=True):
                case = {"section": section, "precision": precision, "shape": shape}
                own = [row for row in rows if case.items() <= row.items()]
                own.sort(key=lambda row: float(row["density"]))
                density, speedup, bound = (
                    [float(row[key]) for row in own] for key in ("density", "speedup", "bound")
                )
                axes.plot(density, speedup, "-o", color=colour, label=f"{shape} {precision}")
                axes.plot(density, bound, "--", color=GREY, linewidth=0.8)
            axes.axhline(1, color=GREY, linewidth=1)
            axes.set(xscale="log", title=title, xlabel="active fraction", ylabel="dense time / sparse time")
            axes.set_xticks(densities, [f"{density:.0%}" for density in densities])
            axes.minorticks_off()
        panels[0].legend()
    return picture
