# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Read a run and follow a neuron
#
# The run is the directory that the environment variable `FFNLAB_RUN` names, or else the newest one in
# `outputs/`.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from ffnlab.analysis import geometry
from ffnlab.analysis.runs import Run


def newest() -> Path:
    """The run directory that was begun or changed last, in outputs/ here or beside notebooks/."""
    found = [
        config.parent
        for outputs in (Path("outputs"), Path("../outputs"))
        for depth in ("*", "*/*")
        for config in outputs.glob(f"{depth}/config.yaml")
    ]
    if not found:
        raise SystemExit("there is no run yet: make one with `python train.py probe=[default,trace]`")
    return max(found, key=lambda run: (run / "config.yaml").stat().st_mtime)


run = Run(Path(os.environ["FFNLAB_RUN"]) if "FFNLAB_RUN" in os.environ else newest())
print(run.path)
print("status:", run.info.get("status"))
for group in ("ffn", "act", "threshold"):
    print(f"{group}:", {key: value for key, value in run.config[group].items() if value is not None})

# %% [markdown]
# ## The loss

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for key, mark in (("train/loss", "-"), ("val/loss", "o--")):
    axes.plot(*run.series(key), mark, label=key)
axes.set(xlabel="step (updates)", ylabel="loss (nats per token)")
_ = axes.legend()

# %% [markdown]
# ## One layer, and the neuron in it that changed most
#
# Do all neurons decay alike? The band holds 90 % of the layer's neurons. Set `layer` and `neuron` to follow
# another.

# %%
layers = run.layers("activity")
if not layers:
    raise SystemExit(f"{run.path} holds no active fractions: record them with probe=default")
layer = layers[0]
fractions = run.neurons(f"{layer}/activity")["active_frac"]
neuron = int(np.nanargmax(np.abs(fractions[-1].values - fractions[0].values)))

low, high = (fractions.quantile(q, "neuron") for q in (0.05, 0.95))
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.fill_between(fractions.step, low, high, color="0.85", label="90 % of the neurons")
axes.plot(fractions.step, fractions.mean("neuron"), "-", label=f"{layer}, mean")
axes.plot(fractions.step, fractions[:, neuron], "o--", markersize=3, label=f"{layer}, neuron {neuron}")
axes.set(xlabel="step (updates)", ylabel="active fraction of the probed tokens", ylim=(0, 1))
_ = axes.legend()

# %% [markdown]
# ## Predicted and measured
#
# If a neuron's pre-activations are normal with mean m and standard deviation s, then it is active on the
# share $1 - \Phi((C - m)/s)$ of the tokens. m and s are measured on the same tokens, so where the fractions
# differ by more than the sampling error, the pre-activations are not normal.

# %%
n_tokens = run.config["probe"]["tokens"]
_, recorded = run.series(f"probe/threshold/{layer}/c")
c = float(recorded[-1]) if len(recorded) else 0.0
if f"{layer}/preact" in run.groups:
    last = run.neurons(f"{layer}/preact").isel(step=-1)
    pairs = zip(last["mean"].values.tolist(), last["sd"].values.tolist(), strict=True)
    predicted = [geometry.active_frac(c - mean, sd) if sd > 0 else np.nan for mean, sd in pairs]
    measured = fractions[-1].values
    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.6")
    axes.plot(predicted, measured, ".", markersize=2)
    axes.set(xlabel=f"predicted from m, s and C = {c:.3g}", ylabel="measured active fraction", aspect="equal")
    error = geometry.sampling_sd(float(np.nanmean(measured)), n_tokens)
    print(f"root mean square difference {np.sqrt(np.nanmean((measured - predicted) ** 2)):.3f};")
    print(f"{error:.3f} would be the sampling error on {n_tokens} independent tokens")

# %% [markdown]
# ## Its tokens, step by step
#
# Every line is one probed token. The dashed line is C; a token above it activates the neuron.

# %%
traced = run.layers("trace")
if traced:
    layer = traced[0]
    trace = run.neurons(f"{layer}/trace")["preact"]
    neuron = min(neuron, trace.sizes["neuron"] - 1)
    lines = trace[:, :, neuron].values.astype(np.float32)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(trace.step, lines, color="C0", linewidth=0.5, alpha=0.5)
    axes.axhline(c, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="step (updates)", ylabel=f"pre-activation of {layer}, neuron {neuron}")
    print(f"{np.mean((lines > c).any(0)):.0%} of the tokens activate it at least once")
else:
    print("no token was traced: record traces with `python train.py probe=[default,trace]`")
