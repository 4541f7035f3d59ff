"""Trends in the rows of a run; `course` says what each symptom is."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from ffnlab.verbs.doctor.finding import Finding, Verdict, within

NEVER_FELL = 0.02
CAME_BACK, BACK_SE = 0.25, 6.0
BLOCKS = 12
T_LIMIT = 2.23  # 95 %, two-sided, BLOCKS - 2 degrees of freedom
IDLE_LR = 0.01
NOISE_LOOK, NOISE_BAD = 0.03, 0.15
SPIKE, SPIKE_SIZE = 6.0, 0.05
GRAD_BLOCKS = 50
EXPLODES_LOOK, EXPLODES_BAD, VANISHES_LOOK = 10.0, 100.0, 1e-3

Series = Float[np.ndarray, " n"]


def window(n: int) -> int:
    """Rows in a smoothing window: odd, a twentieth of all, at least 5."""
    return max(5, n // 20) | 1


def smooth(values: Series) -> Series:
    """Mean over the window around each row, over what there is of it at the ends."""
    ones = np.ones(window(len(values)))
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def running(values: Series, statistic: Any) -> Series:
    """`statistic(rows, axis=1)` over the window around each row; the ends are repeated outwards."""
    half = window(len(values)) // 2
    padded = np.pad(values, half, mode="edge")
    return statistic(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def since_when(steps: Series, over: Bool[np.ndarray, " n"]) -> float:
    """The first step of the stretch that is `over` up to the end; gaps shorter than a window do not count."""
    first, gap = len(over) - 1, 0
    for k in range(len(over) - 1, -1, -1):
        gap = 0 if over[k] else gap + 1
        first = k if over[k] else first
        if gap > window(len(over)):
            break
    return float(steps[first])


def falling(steps: Series, loss: Series, lr: Series, cfg: Mapping[str, Any]) -> Finding:
    """Whether the training loss fell, stayed down and still falls."""
    smoothed, start = smooth(loss), float(loss[0])
    third = slice(2 * len(loss) // 3, None)
    final, lowest = float(loss[third].mean()), float(smoothed.min())
    t, rate = slope(loss[third][lr[third] > IDLE_LR * lr.max()]), float(cfg["optim"]["lr"])
    se = float((loss - smoothed)[third].std()) / math.sqrt(window(len(loss)))  # of a smoothed value
    verdict: Verdict = "ok"
    where, shown, remedy = "run", f"falls, t = {t:.1f}", ""
    if final > (1 - NEVER_FELL) * start and lowest > (1 - NEVER_FELL) * start:
        verdict, where, shown = "bad", f"step {steps[0]:.0f}", f"never fell: {start:.3g} to {final:.3g}"
        remedy = f"optim.lr={rate * 3:.2g} or {rate / 3:.2g} (now {rate:g}), optim.weight_decay=0, the labels"
    elif smoothed[-1] - lowest > max(CAME_BACK * (start - lowest), BACK_SE * se):
        verdict, where = "bad", f"since step {steps[smoothed.argmin()]:.0f}"
        shown = f"back up: {lowest:.3g} to {smoothed[-1]:.3g}"
        remedy = f"optim.lr={rate / 2:g} (half of now), train.clip=1.0"
    elif t > -T_LIMIT:
        flat = np.abs(smoothed - final) <= 3 * se + 1e-3 * start
        verdict, where, shown = "look", f"since step {since_when(steps, flat):.0f}", f"plateau, t = {t:.1f}"
        other = f"optim.lr={rate * 2:g} or {rate / 2:g}, optim.weight_decay=0, the labels"
        remedy = f"nothing if all is learnt; else {other}"
    return Finding("train/loss falls", where, t, f"t < -{T_LIMIT}", verdict, remedy, shown=shown)


def slope(loss: Series) -> float:
    """Slope of the means of BLOCKS equal blocks over its standard error: least squares; 0 without a slope."""
    if len(loss) < BLOCKS:
        return 0.0
    means = np.array([block.mean() for block in np.array_split(loss, BLOCKS)])
    x = np.arange(BLOCKS) - (BLOCKS - 1) / 2
    b = float(x @ means / (x @ x))
    rest = means - means.mean() - b * x
    se = math.sqrt(float(rest @ rest) / (BLOCKS - 2) / float(x @ x))
    return 0.0 if abs(b) < 1e-12 else b / max(se, 1e-12)


def noise(steps: Series, loss: Series, cfg: Mapping[str, Any]) -> Finding:
    """E57's loss noise, and since when it is so large."""
    start, rest = float(loss[0]), loss - smooth(loss)
    half = len(loss) // 2
    edge = window(len(loss)) // 2  # where the window is cut off, the mean lags behind a falling loss
    value = float(rest[half : len(loss) - edge].std()) / start
    verdict = within(value, (0, NOISE_LOOK), (0, NOISE_BAD))
    since = since_when(steps, running(rest, np.std) > NOISE_LOOK * start)
    rate, accum = float(cfg["optim"]["lr"]), cfg["train"]["grad_accum"]
    return Finding(
        "loss noise / first loss",
        "run" if verdict == "ok" else f"since step {since:.0f}",
        value,
        f"under {NOISE_LOOK:g}",
        verdict,
        "" if verdict == "ok" else f"optim.lr={rate / 3:.2g} (now {rate:g}), or train.grad_accum={4 * accum}",
    )


def spikes(steps: Series, loss: Series, cfg: Mapping[str, Any]) -> Finding:
    """Single losses far above their neighbours."""
    rest = (loss - running(loss, np.median))[len(loss) // 10 :]
    sd = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    high = np.flatnonzero((rest > SPIKE * sd) & (rest > SPIKE_SIZE * loss[0])) + len(loss) // 10
    found = len(high) > 0
    rate = float(cfg["optim"]["lr"])
    clip = "train.clip=1.0" if cfg["train"]["clip"] is None else f"train.clip={cfg['train']['clip'] / 2:g}"
    return Finding(
        "loss spikes",
        f"step {steps[high[0]]:.0f}" if found else "run",
        float(len(high)),
        "none",
        "look" if found else "ok",
        f"{clip}, or optim.lr={rate / 2:g}" if found else "",
        shown=f"{len(high)}, first of {loss[high[0]]:.3g}" if found else "none",
    )


def gradient(steps: Series, norm: Series, cfg: Mapping[str, Any]) -> Finding:
    """The gradient norm (before clipping) against its own past: the block furthest above it, else below."""
    blocks = np.array_split(np.arange(len(norm)), min(GRAD_BLOCKS, len(norm) // 5))
    medians = np.array([np.median(norm[rows]) for rows in blocks])
    before = np.array([np.median(medians[:b]) for b in range(1, len(medians))])
    ratios = medians[1:] / np.maximum(before, 1e-30)
    peak = int(ratios.argmax() if ratios.max() > EXPLODES_LOOK else ratios.argmin())
    value = float(ratios[peak])
    expected = f"{VANISHES_LOOK:g} to {EXPLODES_LOOK:g}"
    verdict = within(value, (VANISHES_LOOK, EXPLODES_LOOK), (0, EXPLODES_BAD))
    if verdict == "ok":
        return Finding("gradient norm / its past", "run", value, expected)
    up = value > 1
    over = ratios > EXPLODES_LOOK if up else ratios < VANISHES_LOOK
    first = int(np.argmax(over))
    limit = (EXPLODES_LOOK if up else VANISHES_LOOK) * before[first]
    rows = np.concatenate(blocks[first : first + 2])
    hit = rows[norm[rows] > limit] if up else rows[norm[rows] < limit]
    remedy = "train.clip=1.0, a lower optim.lr, residual=pre or residual.scale=0.8"
    return Finding(
        "gradient norm / its past",
        f"since step {steps[hit[0] if len(hit) else rows[0]]:.0f}",
        value,
        expected,
        verdict,
        remedy if up else "norm=rmsnorm, residual=pre, act=leaky_relu or act=gelu, model.init=he",
        shown=f"{'explodes' if up else 'vanishes'}, x {value:.3g}",
    )
