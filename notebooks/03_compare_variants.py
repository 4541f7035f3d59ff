# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Compare variants
#
# Reads the runs of one study: the folder that the environment variable `FFNLAB_STUDY` names, or else the
# newest folder in `outputs/` that holds at least two runs. An arm is a variant; its runs differ by their
# seed.

# %%
import os
import re
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from ffnlab.analysis.runs import Run


def newest() -> Path:
    """The study folder with the newest run, in outputs/ here or beside notebooks/."""
    found: dict[Path, list[float]] = defaultdict(list)
    for outputs in (Path("outputs"), Path("../outputs")):
        for config in outputs.glob("*/*/config.yaml"):
            found[config.parents[1]].append(config.stat().st_mtime)
    studies = [study for study, times in found.items() if len(times) > 1]
    if not studies:
        raise SystemExit(
            "there is no study yet: make one with `python train.py -m study=first ffn=mlp,swiglu seed=0,1`"
        )
    return max(studies, key=lambda study: max(found[study]))


study = Path(os.environ["FFNLAB_STUDY"]) if "FFNLAB_STUDY" in os.environ else newest()
runs = [Run(config.parent) for config in sorted(study.glob("*/config.yaml"))]
arms: dict[str, list[Run]] = defaultdict(list)
for run in runs:
    if run.info.get("status") == "done":
        # A sweep names its folders <arm or overrides>-s<seed>-<hash>.
        arms[run.config["arm"] or re.sub(r"-s\d+-[0-9a-f]+$", "", run.name)].append(run)
    else:
        print(f"left out: {run.name} ({run.info.get('status', 'not started')})")
if not arms:
    raise SystemExit(f"{study} holds no run that is done")

# %% [markdown]
# ## The table
#
# Means over seeds, with the standard deviation where there are several. The active fraction is the share of
# (token, neuron) pairs of the probe batch, mean over layers; C is the mean over layers. Differences smaller
# than the spread between seeds say nothing.


# %%
def last(run: Run, pattern: str) -> float:
    """The last value of a metric, mean over the layers that have it; nan where none has."""
    values = [run.series(key)[1][-1] for key in run.keys(pattern)]
    return float(np.mean(values)) if values else float("nan")


def cell(values: list[float]) -> str:
    if np.isnan(values).all():
        return "-"
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


columns = {
    "val/loss": "val/loss",
    "active fraction": r"probe/activity/L\d+/active_frac",
    "C": r"probe/threshold/L\d+/c",
}
width = max(len(arm) for arm in arms)
print(f"{'arm':<{width}}   n" + "".join(f"{name:>20}" for name in columns) + f"{'parameters':>14}")
for arm, members in arms.items():
    cells = (cell([last(run, pattern) for run in members]) for pattern in columns.values())
    parameters = members[0].info["parameters"]
    print(
        f"{arm:<{width}}{len(members):>4}" + "".join(f"{text:>20}" for text in cells) + f"{parameters:>14,}"
    )

# %% [markdown]
# ## Curves
#
# Every run is a line, every arm a colour and a dash.

# %%
looks = [
    (f"C{i % 10}", dash)
    for i, dash in zip(range(len(arms)), ["-", "--", "-.", ":"] * len(arms), strict=False)
]
figure, (losses, activity) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for (arm, members), (colour, dash) in zip(arms.items(), looks, strict=True):
    for i, run in enumerate(members):
        label = arm if i == 0 else None
        losses.plot(
            *run.series("val/loss"), color=colour, linestyle=dash, marker="o", markersize=3, label=label
        )
        layers = run.keys(r"probe/activity/L\d+/active_frac")
        names = [key.split("/")[2] for key in layers]
        fractions = [run.series(key)[1][-1] for key in layers]
        activity.plot(names, fractions, color=colour, linestyle=dash, marker="o", markersize=3, label=label)
losses.set(xlabel="step (updates)", ylabel="validation loss (nats per token)")
activity.set(xlabel="layer", ylabel="active fraction at the end", ylim=(0, 1))
_ = losses.legend()
