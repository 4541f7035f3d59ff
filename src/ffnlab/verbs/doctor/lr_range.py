"""The learning-rate range test (Smith, arXiv 1506.01186): a short training whose rate grows each step."""

import math
from collections.abc import Iterator
from statistics import fmean

import torch

from ffnlab import build
from ffnlab.train import grad_norm, gradients
from ffnlab.verbs.doctor.finding import Finding, Verdict
from ffnlab.verbs.doctor.subject import Subject, anew

STEPS = 40
FACTORS = (1e-3, 1e2)  # on the configured rate: first and last step
SMOOTH = 5  # losses in a mean
BLOWN_UP = 1.2  # smoothed loss over its lowest so far
MARGIN = 3.0  # how far below the blow-up a rate should stay: the test is short, training is long


def check(subject: Subject) -> Iterator[Finding]:
    """Where the loss falls fastest, and where it blows up, against the configured rate."""
    lr = float(subject.cfg["optim"]["lr"])
    rates = [lr * FACTORS[0] * (FACTORS[1] / FACTORS[0]) ** (k / (STEPS - 1)) for k in range(STEPS)]
    steepest, blown_up = landmarks(rates, losses(subject, rates))
    yield Finding(
        "lr range: steepest fall",
        f"{STEPS} steps",
        steepest,
        f"optim.lr={lr:g} is near or below",
        shown=f"{steepest:.2g}",
    )
    verdict: Verdict = "bad" if lr >= blown_up else "look" if lr * MARGIN > blown_up else "ok"
    shown = f"{blown_up:.2g}" if blown_up < math.inf else f"none up to {rates[-1]:.2g}"
    lower = f"optim.lr={blown_up / MARGIN:.1g} (now {lr:g})" if blown_up else "a first loss that is finite"
    remedy = "" if verdict == "ok" else lower
    yield Finding(
        "lr range: blow-up",
        f"{STEPS} steps",
        blown_up,
        f"above {MARGIN:g} x optim.lr",
        verdict,
        remedy,
        shown=shown,
    )


def losses(subject: Subject, rates: list[float]) -> list[float]:
    """The loss of the batch before every update, on a model that starts anew; ends with a NaN where the loss
    or its gradient is not finite.
    """
    model = anew(subject).model
    optimizer, before_update = build.optimizer(subject.cfg, model), build.regulariser(subject.cfg, model)
    scaler = torch.amp.GradScaler(enabled=False)
    found = []
    with subject.own_dropout():
        for number, rate in enumerate(rates, 1):
            optimizer.set_factor(rate / optimizer.lr)
            before_update(number)
            mean, _ = gradients(model.loss, [subject.batch(number)], subject.autocast, scaler)
            norm = grad_norm(model.parameters(), subject.train.clip)
            if not (math.isfinite(mean) and math.isfinite(norm)):
                return [*found, math.nan]
            found.append(mean)
            optimizer.step()
            optimizer.zero_grad()
    return found


def landmarks(rates: list[float], found: list[float]) -> tuple[float, float]:
    """(rate of the steepest fall of the smoothed loss per step, i.e. per factor of the rate; the first rate
    whose update brought the smoothed loss to BLOWN_UP times its lowest or to no number, else infinity).

    Loss k + 1 is the first that update k, at rate k, can have changed. The smoothed loss k is the mean of
    the SMOOTH losses that end with loss k. A first loss that is no number leaves no rate: 0.
    """
    if not math.isfinite(found[0]):
        return 0.0, 0.0
    smooth = [fmean(found[max(0, k - SMOOTH + 1) : k + 1]) for k in range(len(found))]
    end = len(smooth)
    for k in range(1, len(smooth)):
        if not smooth[k] < BLOWN_UP * min(smooth[:k]):
            end = k
            break
    blown_up = rates[end - 1] if end < len(smooth) else math.inf
    falls = [smooth[k] - smooth[k + 1] for k in range(end - 1)]
    steepest = max(range(len(falls)), key=falls.__getitem__, default=0)
    return rates[steepest], blown_up
