"""The training loop: plain callables in, rows of numbers out. It knows no variant, no Hydra, no W&B."""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ffnlab.clock import Clock
from ffnlab.spikes import Pair, remember, spike_score
from ffnlab.update import Batch, grad_norm, gradients, update

Row = dict[str, float]
MAX_OVERFLOWS = 20  # fp16 steps in a row that overflow before a run counts as diverged


@dataclass(frozen=True)
class TrainConfig:
    """The `train` group of the configuration (configs/train.yaml says what each key means)."""

    steps: int
    batch_size: int
    grad_accum: int
    clip: float | None
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    threads: int | Literal["auto"]
    compile: bool
    checkpoint_activations: bool
    log_every: int
    eval_every: int
    eval_batches: int | None
    target_loss: float | None
    on_nonfinite: Literal["stop", "skip"]
    max_skips: int
    max_skips_in_a_row: int
    on_spike: Literal["ignore", "log", "rewind"]
    spike_window: int
    spike_sigma: float


@dataclass
class Progress:
    """All that the loop itself must remember across a resume."""

    step: int = 0  # updates done
    tokens: int = 0  # training tokens seen
    time_s: float = 0.0  # seconds of all sessions
    pending: Row | None = None  # the row of `step`, whose evaluation a stop cut off: it is done again
    skips: int = 0  # updates left out because a number was not finite
    skips_in_a_row: int = 0
    recent: list[Pair] = field(default_factory=list)  # of the updates before, where spikes are looked for
    rewinds: int = 0  # times that the run went back to a checkpoint after a spike
    passed_over: int = 0  # batches left out by that: update k takes batch k + passed_over


class Diverged(Exception):
    """The loss or the gradient is not finite; raised before the update that would have used it."""


class Rewind(Exception):
    """Update `step` is a spike: go on from `checkpoint`, with other batches than those up to it."""

    def __init__(self, step: int, checkpoint: Path):
        super().__init__(f"step {step}: back to {checkpoint}")
        self.step, self.checkpoint = step, checkpoint


@dataclass
class Hooks:
    """What the loop calls and when. `evaluate`, `observe` and `on_gradients` only read the model."""

    batches: Callable[[int], Sequence[Batch]]  # micro-batches of update k
    schedule: Callable[[int], float]  # factor on the learning rate of update k
    precision: Callable[[], AbstractContextManager]  # autocast
    before_update: Callable[[int], None]  # sets what in the objective depends on k
    evaluate: Callable[[int], Row]  # after update k; at 0, every eval_every and at the end
    observe: Callable[[int], Row]  # after update k; {} where no probe is due
    on_gradients: Callable[[int], None]  # before clipping
    log: Callable[[Row], None]
    save: Callable[[Progress, bool], None]  # after every update; True on a stop and at the end
    stop: Callable[[], bool]  # asked at every step boundary, before and after an evaluation
    add_up: Callable[[Sequence[Tensor]], None]  # sum tensors over processes; nothing to do for one
    diagnose: Callable[[int, Sequence[Batch], str], str]  # writes where numbers went bad; says it
    on_spike: Callable[[Row], Path | None]  # the row of the next update; where to go back to; None: go on


def step_seed(seed: int, step: int) -> int:
    """Seeds dropout by (seed, step), so that a resume needs no random state."""
    return seed + 1_000_003 * step


def train(
    cfg: TrainConfig,
    hooks: Hooks,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    seed: int,
    progress: Progress,
) -> Progress:
    """Update k for k = progress.step + 1 .. steps; returns early on `hooks.stop()` or at `target_loss`.

    `loss(x, y)` is the sum of the cross-entropy over the targets. Row k holds the loss of the batch that
    made update k. A stop is heard at every step boundary and inside an evaluation, which is then done again
    when the run goes on.
    Raises Diverged before an update with a non-finite loss or gradient, Rewind before one that is a spike.
    """
    clock = Clock()
    target = -math.inf if cfg.target_loss is None else cfg.target_loss
    written = (progress.step, progress.tokens)  # of the last row

    def finish(row: Row, evaluate: bool, write: bool) -> bool:
        """Evaluate where that is due, write the row of this step, save; whether to go on."""
        nonlocal written
        step, stop = progress.step, hooks.stop()
        if write and step > written[0]:
            clock.measure(row, progress.tokens - written[1], step - written[0])
            written = (step, progress.tokens)
        found = clock.timed("outside", hooks.evaluate, step) if evaluate and not stop else {}
        stop = stop or (evaluate and hooks.stop())
        progress.time_s += clock.session()
        progress.pending = row if evaluate and stop else None
        if write and progress.pending is None:
            row |= found
            hooks.log({"step": step, "tokens": progress.tokens, "time_s": progress.time_s, **row})
        if not math.isfinite(found.get("val/loss", 0.0)) and not stop:
            what = f"step {step}: val/loss is {found['val/loss']}"
            micro = hooks.batches(max(step, 1) + progress.passed_over)  # at the start, the first ones
            raise Diverged(f"{what}; {hooks.diagnose(step, micro, what)}")
        reached = not stop and found.get("val/loss", math.inf) <= target
        if step:
            clock.timed("outside", hooks.save, progress, stop or reached or step == cfg.steps)
        return not (stop or reached)

    go_on = True
    if progress.step == 0:
        go_on = finish(clock.timed("outside", hooks.observe, 0), evaluate=True, write=True)
        clock = Clock()
    elif progress.pending is not None:
        go_on = finish(progress.pending, evaluate=True, write=True)
    while go_on and progress.step < cfg.steps:
        torch.manual_seed(step_seed(seed, progress.step + 1))
        row = one_update(cfg, hooks, clock, loss, parameters, optimizer, scaler, progress)
        step = progress.step
        row |= (seen := clock.timed("probe", hooks.observe, step))
        evaluate = step % cfg.eval_every == 0 or step == cfg.steps
        go_on = finish(row, evaluate, evaluate or bool(seen) or step % cfg.log_every == 0)
    return progress


def one_update(
    cfg: TrainConfig,
    hooks: Hooks,
    clock: Clock,
    loss: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    progress: Progress,
) -> Row:
    """Update `progress.step + 1`, made or left out; `progress` counts it. Returns what its row says of it."""
    step = progress.step + 1
    optimizer.set_factor(factor := hooks.schedule(step))
    hooks.before_update(step)
    micro = hooks.batches(step + progress.passed_over)
    mean, count = gradients(loss, micro, hooks.precision, scaler, hooks.add_up)
    hooks.add_up([p.grad for p in parameters if p.grad is not None])
    for inner in optimizer.optimizers:
        scaler.unscale_(inner)
    clock.timed("probe", hooks.on_gradients, step)
    norm = grad_norm(parameters, cfg.clip)
    row = {"train/loss": mean, "optim/lr": optimizer.lr * factor, "optim/grad_norm": norm}
    if not (leave_out := bad_numbers(cfg, hooks, progress, scaler.is_enabled(), micro, row)):
        look_for_spike(cfg, hooks, progress, row)
    update(optimizer, scaler, leave_out)
    optimizer.zero_grad()
    progress.step, progress.tokens = step, progress.tokens + count
    return row


def bad_numbers(
    cfg: TrainConfig, hooks: Hooks, progress: Progress, fp16: bool, micro: Sequence[Batch], row: Row
) -> bool:
    """Whether the next update must be left out, because its loss or gradient is not finite. Counts those, and
    raises Diverged where `train.on_nonfinite` allows none, or no more. In fp16 a gradient that overflows is
    in the order of things.
    """
    mean, norm, step = row["train/loss"], row["optim/grad_norm"], progress.step + 1
    bad = not (math.isfinite(mean) and math.isfinite(norm))
    progress.skips_in_a_row = progress.skips_in_a_row + 1 if bad else 0
    overflow = fp16 and math.isfinite(mean) and progress.skips_in_a_row <= MAX_OVERFLOWS
    if bad and not overflow:
        what = (
            f"the gradient norm is {norm} (loss {mean:.4f})" if math.isfinite(mean) else f"the loss is {mean}"
        )
        what = f"step {step}: {what}"
        progress.skips += 1
        where = hooks.diagnose(step, micro, what)
        if cfg.on_nonfinite == "stop":
            raise Diverged(f"{what}; {where}")
        for key, n in (("max_skips", progress.skips), ("max_skips_in_a_row", progress.skips_in_a_row)):
            if n > getattr(cfg, key):
                raise Diverged(
                    f"{what}; {where}; train.{key}={getattr(cfg, key)} updates were left out before"
                )
        count = f"({progress.skips} of at most {cfg.max_skips})"
        warnings.warn(f"{what}; {where}; this update is left out {count}", stacklevel=2)
    if cfg.on_nonfinite == "skip":
        row["optim/skips"] = progress.skips
    return bad


def look_for_spike(cfg: TrainConfig, hooks: Hooks, progress: Progress, row: Row) -> None:
    """Puts the score of the next update into its row; raises Rewind where it is a spike that is not let
    through.
    """
    if cfg.on_spike == "ignore":
        return
    now = (row["train/loss"], row["optim/grad_norm"])
    row["optim/spike_score"] = spike_score(progress.recent, cfg.spike_window, now)
    if row["optim/spike_score"] > cfg.spike_sigma:
        checkpoint = hooks.on_spike(row)
        if checkpoint is not None:
            raise Rewind(progress.step + 1, checkpoint)
    remember(progress.recent, cfg.spike_window, now)
