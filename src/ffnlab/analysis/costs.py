"""What an arm costs: size, FLOPs, pace, sparsity, and what it took to come to a loss."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ffnlab.analysis.arms import Arm
from ffnlab.analysis.contrasts import Values
from ffnlab.analysis.curves import TRAINING, Reached, Steps, equivalent_steps, mean_curve, reached
from ffnlab.analysis.runs import Run

ACTIVE = r"probe/activity/(L\d+\w*)/active_frac"


@dataclass(frozen=True)
class ToLoss:
    """Medians over the seeds that aimed at a loss, infinite where half of them did not come to it."""

    steps: float
    seconds: float
    flops: float
    reached: int
    of: int


@dataclass(frozen=True)
class Cost:
    """Of an arm; None is what its runs do not say."""

    parameters: int | None
    flops_per_token: int | None  # forward
    tok_per_s: float | None  # median over seeds of the runs' medians
    active_frac: float | None  # mean over seeds of the mean over layers, at the end
    skippable_flops_per_token: float | None  # of training, see `skippable`; mean over seeds
    skippable_frac: float | None  # of all FLOPs of training
    baseline_steps: Steps | None  # where the baseline's mean curve is at the arm's mean loss
    to_loss: ToLoss | None


def costs(
    arms: Mapping[str, Arm], values: Values, baseline: str, curve: str | None, target: float | None
) -> dict[str, Cost]:
    """The cost of every arm. `curve` is the loss whose curve is read (None: no curve), `target` the loss to
    come to (None: for each seed the baseline's last one, or its mean where the baseline lacks the seed).
    """
    theirs = values[baseline]
    fallback = statistics.fmean(theirs.values())
    drawn = mean_curve(list(arms[baseline].runs.values()), curve) if curve else None
    found = {}
    for name, arm in arms.items():
        runs = list(arm.runs.values())
        flops = agreed(runs, "flops_per_token")
        saved = over_seeds(statistics.fmean, runs, skippable)
        times, equal = None, None
        if curve and runs:
            aims = {seed: target if target is not None else theirs.get(seed, fallback) for seed in arm.runs}
            times = to_loss([reached(run, curve, aims[seed]) for seed, run in arm.runs.items()])
            if drawn and len(drawn[0]) > 1 and name != baseline:
                equal = equivalent_steps(*drawn, statistics.fmean(values[name].values()))
        found[name] = Cost(
            parameters=agreed(runs, "parameters"),
            flops_per_token=flops,
            tok_per_s=over_seeds(statistics.median, runs, pace),
            active_frac=over_seeds(statistics.fmean, runs, active),
            skippable_flops_per_token=saved,
            skippable_frac=saved / (TRAINING * flops) if saved is not None and flops else None,
            baseline_steps=equal,
            to_loss=times,
        )
    return found


def to_loss(all_seeds: list[Reached]) -> ToLoss:
    """The medians over seeds."""
    medians = [statistics.median(values) for values in zip(*all_seeds, strict=True)]
    hits = sum(one.steps < float("inf") for one in all_seeds)
    return ToLoss(*medians, reached=hits, of=len(all_seeds))


def active_by_layer(run: Run) -> dict[str, float]:
    """layer -> the mean active fraction of its neurons at the last probe."""
    keys = {key.split("/")[2]: key for key in run.keys(ACTIVE)}
    return {layer: float(run.series(key)[1][-1]) for layer, key in keys.items()}


def active(run: Run) -> float | None:
    """The mean over layers of the active fraction at the end."""
    layers = active_by_layer(run)
    return statistics.fmean(layers.values()) if layers else None


def skippable(run: Run) -> float | None:
    """FLOPs of training per token that a kernel could skip at the sparsity of the run's end.

    Sum over layers of (1 - p) * the layer's `skippable_flops_per_token` in run.json: the products of
    matrices with a row or column per neuron (forward, and two backward), but for the one that gives the
    pre-activations; 0 for activations without exact zeros. p is the active fraction of the neurons that a
    token meets: that of all, divided by `token_share` (experts: top_k / n_experts, else 1).
    """
    by_layer, layers = run.info.get("skippable_flops_per_token"), active_by_layer(run)
    if by_layer is None or not layers:
        return None
    met = run.info.get("token_share", {})
    p = {layer: active / met.get(layer, 1.0) for layer, active in layers.items()}
    return sum((1 - p[layer]) * flops for layer, flops in by_layer.items() if layer in p)


def pace(run: Run) -> float | None:
    """Tokens per second at the median row."""
    return run.info.get("timings", {}).get("median_tok_per_s")


def over_seeds(
    mean: Callable[[list[float]], float], runs: list[Run], say: Callable[[Run], float | None]
) -> float | None:
    """The mean (or median) of what the runs say, of those that say it."""
    said = [value for run in runs if (value := say(run)) is not None]
    return mean(said) if said else None


def agreed(runs: list[Run], key: str) -> int | None:
    """What run.json of the arm's first run says: the runs of an arm are one configuration."""
    return runs[0].info.get(key) if runs else None
