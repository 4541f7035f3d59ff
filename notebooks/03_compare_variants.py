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
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

from ffnlab.analysis import compared, tables
from ffnlab.analysis.compare import compare
from ffnlab.analysis.costs import active_by_layer


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
comparison = compare([study])
print(f"{study}, runs without a result: {len(comparison.unfinished)}, diverged: {comparison.diverged or 0}")
print("\n".join(comparison.warnings))

# %% [markdown]
# ## What comes out, and what it costs
#
# Means over seeds, and the difference from the first arm with its confidence interval and test;
# `ffnlab compare` gives the same tables and explains every column.

# %%
tables.show(compared.effects(comparison))

# %%
tables.show(compared.spent(comparison))

# %% [markdown]
# ## Curves
#
# Every run is a line, every arm a colour and a dash. The active fraction is the share of (token, neuron)
# pairs of the probe batch at the last look.

# %%
figure, (losses, activity) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for number, (name, arm) in enumerate(comparison.arms.items()):
    look = {"color": f"C{number % 10}", "linestyle": ("-", "--", "-.", ":")[number % 4], "marker": "."}
    for place, run in enumerate(arm.runs.values()):
        label = name if place == 0 else None
        losses.plot(*run.series(comparison.metric), label=label, **look)
        fractions = active_by_layer(run)
        activity.plot(list(fractions), list(fractions.values()), label=label, **look)
losses.set(xlabel="step (updates)", ylabel="validation loss (nats per token)")
activity.set(xlabel="layer", ylabel="active fraction at the end", ylim=(0, 1))
_ = losses.legend()
