# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Geometry of a normalised neuron
#
# RMSNorm puts every input of the FFN on a sphere of radius $\sqrt D$. What a neuron with input weights $w$
# sees of an input is then an angle: $w x = |w| \sqrt D \sin t$, with $t$ measured from the plane of all
# inputs at right angles to $w$. This notebook needs no run; `ffnlab figures RUN` draws `sphere`,
# `activation_vs_angle`, `dot_products` and `equator` with a run's activation, threshold C and width.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np

from ffnlab.analysis import geometry

# %% [markdown]
# ## From the boundary to the neuron's direction
#
# The input slides from A (at right angles to the neuron, 90 degrees from it) to B (aligned with it, 0
# degrees). On the number line ReLU has a constant slope and that of ReLU² grows. On the circle the slope of
# ReLU is greatest at A, where it jumps, and 0 at B; that of ReLU² is 0 at both ends and greatest half-way.

# %%
t = np.radians(np.linspace(-30, 90, 241))
figure, (output, gradient) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, dashes in (("relu", "-"), ("relu2", "--"), ("gelu", ":")):
    curve = geometry.on_circle(t, geometry.activation(name))
    output.plot(np.degrees(t), curve.value, dashes, label=name)
    gradient.plot(np.degrees(t), curve.slope, dashes, label=name)
output.set_ylabel("output for |w| √D = 1")
gradient.set_ylabel("gradient (per radian)")
for axes in (output, gradient):
    axes.axvspan(-10, 10, color="0.9", label="within 10 degrees")
    axes.set_xlabel("angle above the boundary (degrees); A = 0, B = 90")
    axes.legend()

# %% [markdown]
# ## Gates
#
# A ReLU gate tied to the up projection is ReLU². In general the gradient at the gate's boundary is
# proportional to the up pre-activation there: a gate softens the boundary only as far as both boundaries lie
# together.

# %%
at_boundary = np.zeros(1)
print("angle between gate and up (degrees)   slope at the gate's boundary, relu gate, |w| √D = 1")
for degrees in (0, 10, 45, 90):
    gated = geometry.gated_on_circle(at_boundary, geometry.activation("relu"), between=math.radians(degrees))
    print(f"{degrees:>35}   {gated.slope[0]:.3f}")

# %% [markdown]
# ## Many dimensions: everything starts near the boundary
#
# The dot product of two random unit vectors has mean 0 and standard deviation $1/\sqrt D$, exactly.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
degrees = np.linspace(-90, 90, 721)
for d, dashes in ((2, ":"), (10, "--"), (128, "-."), (768, "-")):
    per_degree = geometry.angle_density(np.radians(degrees), d) * math.radians(1)
    axes.plot(degrees, 100 * per_degree, dashes, label=f"D = {d}")
axes.set(xlabel="angle from the boundary (degrees)", ylabel="inputs (% per degree)", xlim=(-45, 45))
_ = axes.legend()

print("   D   sd of the dot product   in degrees   beyond 10 degrees   mean |cos|")
for d in (2, 10, 128, 768):
    sd = geometry.dot_sd(d)
    beyond = geometry.share_beyond(math.radians(10), d)
    print(
        f"{d:>4}   {sd:>21.4f}   {math.degrees(math.asin(sd)):>10.2f}   {beyond:>17.2g}"
        f"   {geometry.mean_abs_dot(d):>10.4f}"
    )
best = geometry.mean_largest_dot(3072, 768)
print(f"\nThe best aligned of 3072 random neurons at D = 768: cosine {best:.3f} on average,")
print(f"{math.degrees(math.asin(best)):.1f} degrees above its boundary.")

# %% [markdown]
# ## How many neurons a threshold leaves active
#
# With `model.init=uniform` pre-activations start with the standard deviation s = 0.5, so that a share
# $1 - \Phi(C/s)$ of them exceeds C.

# %%
s = geometry.init_sd("uniform", 768, 3072)
print("active   C (normal)   C on the sphere, D = 8   D = 768")
for share in (0.1, 0.3, 0.7, 0.9):
    exact = "   ".join(f"{geometry.threshold_for(share, s, d):+.4f}" for d in (8, 768))
    print(f"{share:>6.0%}   {geometry.threshold_for(share, s):>+10.4f}   {exact:>32}")

# %% [markdown]
# ## Neurons in opposite pairs
#
# `ffn=paired` computes `act(u - C)` and `act(-u - C)`: with C = 0 one of the two is active on every token.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
thresholds = np.linspace(-1, 1.5, 101)
covered = [geometry.paired(float(c), s) for c in thresholds]
axes.plot(thresholds, [100 * share.unit for share in covered], "-", label="one unit")
axes.plot(thresholds, [100 * share.pair for share in covered], "--", label="at least one of the pair")
axes.set(xlabel="C (unit of the pre-activation), s = 0.5", ylabel="tokens on which active (%)", ylim=(0, 105))
_ = axes.legend()

# %% [markdown]
# ## What 128 tokens can show
#
# The active fraction of a neuron that is active on half of all tokens, seen on 128 independent ones, has this
# standard deviation; neurons that differ by less do not differ visibly.

# %%
print(f"{geometry.sampling_sd(0.5, 128):.4f}")
