"""Where a run went wrong (E105): what metrics.jsonl says about its course, each symptom with its first step.

Windows count rows with a training loss, n in all; the smoothed value of row k is the mean over the w rows
around it (fewer at the ends), w = max(5, n / 20). `start` is the loss of the first row. The symptoms:

- not finite: a loss or a gradient norm that is NaN or infinite, or a run that was stopped for one.
- training loss: it fell less than NEVER_FELL of `start`; or it came back up from its lowest smoothed value
  by more than CAME_BACK of its fall (and BACK_SE standard errors); or it lies on a plateau: over the last
  third, without the rows whose learning rate is below IDLE_LR of the highest, the slope of BLOCKS means is
  not below 0 by T_LIMIT standard errors. A plateau begins where the smoothed loss came within 3 standard
  errors of the final mean, to stay.
- loss noise (E57): the sd of loss - smoothed loss over the last half, divided by `start`. It begins where the
  sd over w rows exceeded NOISE_LOOK, to stay.
- spikes: rows after the first tenth whose loss exceeds the running median by SPIKE robust standard deviations
  (1.4826 median absolute deviation) and by SPIKE_SIZE of `start`.
- gradient norm: the median over one of GRAD_BLOCKS blocks against the median of all blocks before it.
- dead layer: probe/activity/L03/dead_frac, of the scan, and active_frac, of the probe batch, at the end. It
  begins at the first of the rows that are over the limit up to the end.
- overfitting: val/loss above its lowest value so far, and above the smoothed training loss.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ffnlab.record.metrics import Metrics
from ffnlab.record.rundir import read_info
from ffnlab.verbs.doctor import trend
from ffnlab.verbs.doctor.finding import Finding, within

MIN_ROWS = 36  # fewer say nothing about trends
DEAD_LOOK, DEAD_BAD = 0.25, 0.9  # dead_frac of a layer
ACTIVE_LOOK, ACTIVE_BAD = 0.01, 0.001  # active_frac of a layer
RISE_LOOK, RISE_BAD = 0.02, 0.5  # last val/loss above the lowest, relative
GAP_LOOK = 0.15  # val/loss above train/loss, relative
OF_LAYER = re.compile(r"probe/activity/(L\d\d\w*)/(dead_frac|active_frac)")

Rows = list[dict[str, Any]]


def check(run: Path, cfg: Mapping[str, Any]) -> Iterator[Finding]:
    """All findings about the course of a run; none about trends while it is short."""
    rows = Metrics(run / "metrics.jsonl").read()
    yield finite(rows, read_info(run), cfg)
    course = Course.of(rows)
    if len(course.loss) >= MIN_ROWS:
        yield trend.falling(course.steps, course.loss, course.lr, cfg)
        yield trend.noise(course.steps, course.loss, cfg)
        yield trend.spikes(course.steps, course.loss, cfg)
        yield trend.gradient(course.steps, course.norm, cfg)
    else:
        n = len(course.loss)
        yield Finding("trends", "run", float(n), f"{MIN_ROWS} rows", shown=f"too short: {n} rows")
    yield from dead(rows, cfg)
    yield from overfit(rows, course, cfg)


@dataclass(frozen=True)
class Course:
    """The finite training rows of a run."""

    steps: np.ndarray
    loss: np.ndarray
    lr: np.ndarray
    norm: np.ndarray

    @classmethod
    def of(cls, rows: Rows) -> "Course":
        keys = ("step", "train/loss", "optim/lr", "optim/grad_norm")
        whole = [[row[key] for key in keys] for row in rows if all(key in row for key in keys)]
        table = np.array([line for line in whole if np.isfinite(line).all()], dtype=float).reshape(
            -1, len(keys)
        )
        return cls(*table.T)


def finite(rows: Rows, info: Mapping[str, Any], cfg: Mapping[str, Any]) -> Finding:
    """The first step whose loss or gradient is no number; one that stopped the run wrote no row."""
    found = [
        (row["step"], f"{key} is {row[key]}")
        for row in rows
        for key in ("train/loss", "val/loss", "optim/grad_norm")
        if not math.isfinite(row.get(key, 0.0))
    ]
    if told := re.match(r"step (\d+): ([^(]*)", info.get("diverged", "")):
        found.append((int(told[1]), told[2].strip()))
    if not found:
        return Finding("not finite", "run", 0.0, "never", shown="never")
    step, what = min(found)
    now = cfg["train"]["clip"]
    clip = f"train.clip={1.0 if now is None or now > 1 else now / 2:g} (now {now})"
    remedy = f"optim.lr={cfg['optim']['lr'] / 2:g} (half of now), and {clip}"
    return Finding("not finite", f"step {step}", math.nan, "never", "bad", remedy, shown=what)


def dead(rows: Rows, cfg: Mapping[str, Any]) -> Iterator[Finding]:
    """Layers whose neurons are silent at the end, and since when."""
    ffn = cfg["ffn"]
    met = ffn.get("top_k", 1) / ffn.get("n_experts", 1)  # an expert is silent on the tokens of the others
    limits = {
        "dead_frac": ((0.0, DEAD_LOOK), (0.0, DEAD_BAD), f"under {DEAD_LOOK:.0%}"),
        "active_frac": ((ACTIVE_LOOK * met, 1.0), (ACTIVE_BAD * met, 1.0), f"over {ACTIVE_LOOK * met:.2g}"),
    }
    for key in sorted({key for row in rows for key in row}):
        if (match := OF_LAYER.fullmatch(key)) is None:
            continue
        layer, what = match.groups()
        look, bad, expected = limits[what]
        series = [(row["step"], row[key]) for row in rows if key in row]
        value = series[-1][1]
        silent = takewhile(lambda at, look=look, bad=bad: within(at[1], look, bad) != "ok", reversed(series))
        since = min((step for step, _ in silent), default=None)
        yield Finding(
            f"dead layer: {what}",
            layer if since is None else f"{layer} since step {since}",
            value,
            expected,
            within(value, look, bad),
            "" if since is None else "act=leaky_relu or act=gelu, a lower optim.lr, or a lower threshold",
            off=value if what == "dead_frac" else 1 - value,
        )


def overfit(rows: Rows, course: Course, cfg: Mapping[str, Any]) -> Iterator[Finding]:
    """The validation loss against its own past and against the training loss."""
    series = [(row["step"], row["val/loss"]) for row in rows if math.isfinite(row.get("val/loss", math.nan))]
    if len(series) < 2 or len(course.loss) < MIN_ROWS:
        return
    steps, values = np.array(series).T
    lowest, last = int(values.argmin()), values[-1]
    rise = last / values[lowest] - 1
    train = np.interp(steps, course.steps, trend.smooth(course.loss))
    gaps = (values - train) / values
    now = f"{cfg['model']['dropout']:g}"
    remedy = f"model.dropout=0.1 (now {now}), a smaller ffn.expansion, fewer train.steps, more data"
    verdict = within(float(rise), (0, RISE_LOOK), (0, RISE_BAD))
    yield Finding(
        "val loss above lowest",
        "run" if verdict == "ok" else f"since step {steps[lowest]:.0f}",
        float(rise),
        f"under {RISE_LOOK:.0%}",
        verdict,
        "" if verdict == "ok" else remedy,
        shown=f"{rise:.1%}",
    )
    wide = bool(gaps[-1] > GAP_LOOK)
    small = np.flatnonzero(gaps <= GAP_LOOK)
    since = steps[min(small[-1] + 1 if len(small) else 0, len(steps) - 1)]
    yield Finding(
        "val above train loss",
        f"since step {since:.0f}" if wide else "run",
        float(gaps[-1]),
        f"under {GAP_LOOK:.0%}",
        "look" if wide else "ok",
        remedy if wide else "",
        shown=f"{gaps[-1]:.1%}",
    )
