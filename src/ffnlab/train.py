"""The training loop: plain callables in, rows of numbers out. It knows no variant, no Hydra, no W&B."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Row = dict[str, float]
MAX_OVERFLOWS = 20  # fp16 steps in a row that overflow before a run counts as diverged
Batch = tuple[Tensor, Tensor]


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
    on_nonfinite: Literal["stop"]


@dataclass
class Progress:
    """All that the loop itself must remember across a resume."""

    step: int = 0  # updates done
    tokens: int = 0  # training tokens seen
    time_s: float = 0.0  # seconds of all sessions


class Diverged(Exception):
    """The loss or the gradient is not finite; raised before the update that would have used it."""


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
    stop: Callable[[], bool]  # asked at every step boundary
    add_up: Callable[[Sequence[Tensor]], None]  # sum tensors over processes; nothing to do for one


def synchronize() -> None:
    """Let the accelerator finish, so that what is timed pays for its own work only."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Clock:
    """Wall time since the last row, evaluation and checkpoints left out, probes counted apart."""

    def __init__(self) -> None:
        self.row = self.last = time.perf_counter()
        self.outside = self.probe = 0.0

    def measure(self, row: Row, tokens: int, steps: int) -> None:
        """Add perf/tok_per_s, perf/step_ms and perf/probe_frac to a row of `steps` updates, and start the
        next row.
        """
        now = time.perf_counter()
        seconds = max(now - self.row - self.outside, 1e-9)
        row |= {
            "perf/tok_per_s": tokens / seconds,
            "perf/step_ms": 1e3 * seconds / steps,
            "perf/probe_frac": self.probe / seconds,
        }
        self.row, self.outside, self.probe = now, 0.0, 0.0

    def session(self) -> float:
        """Seconds since this was last asked."""
        self.last, before = time.perf_counter(), self.last
        return self.last - before

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """call(*args), its seconds added to `outside` or `probe`."""
        synchronize()
        start = time.perf_counter()
        out = call(*args)
        synchronize()
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)
        return out


def gradients(
    loss: Callable[[Tensor, Tensor], Tensor],
    micro: Sequence[Batch],
    precision: Callable[[], AbstractContextManager],
    scaler: Any,
    add_up: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> tuple[float, int]:
    """Accumulate this process's part of the gradient of the mean loss over all counted targets.

    Returns that mean and how many targets there are, of all processes: `add_up` sums tensors over them.
    """
    count = torch.stack([(y >= 0).sum() for _, y in micro]).sum()
    add_up([count])
    total = torch.zeros((), device=count.device)
    for x, y in micro:
        with precision():
            part = loss(x, y) / count
        scaler.scale(part).backward()
        total += part.detach()
    add_up([total])
    return float(total), int(count)


def grad_norm(parameters: Iterable[nn.Parameter], clip: float | None) -> float:
    """Euclidean norm of all gradients, which are scaled down to `clip` when it is larger."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip))


def update(optimizer: Any, scaler: Any, norm: float, overflows: int) -> int:
    """Step, unless the gradient is not finite; returns how many steps in a row were left out for that.

    In fp16 an overflow is how the scale finds its size: all parameters keep their values, the scale halves,
    and the step counts as done.
    """
    if not math.isfinite(norm):
        if scaler.is_enabled():
            scaler.update(scaler.get_scale() / 2)
        return overflows + 1
    for inner in optimizer.optimizers:
        scaler.step(inner)
    scaler.update()
    return 0


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
    made update k.
    Raises Diverged before an update with a non-finite loss or gradient.
    """
    clock = Clock()
    tokens_at_row, step_at_row = progress.tokens, progress.step
    overflows = 0

    def finish_row(row: Row) -> None:
        nonlocal tokens_at_row, step_at_row
        if progress.step > step_at_row:
            clock.measure(row, progress.tokens - tokens_at_row, progress.step - step_at_row)
        tokens_at_row, step_at_row = progress.tokens, progress.step
        progress.time_s += clock.session()
        hooks.log({"step": progress.step, "tokens": progress.tokens, "time_s": progress.time_s, **row})

    if progress.step == 0:
        row = clock.timed("outside", hooks.evaluate, 0) | clock.timed("outside", hooks.observe, 0)
        finish_row(row)
        clock = Clock()
    while progress.step < cfg.steps:
        step = progress.step + 1
        torch.manual_seed(seed + 1_000_003 * step)  # dropout by (seed, step): a resume needs no random state
        optimizer.set_factor(factor := hooks.schedule(step))
        hooks.before_update(step)
        mean, count = gradients(loss, hooks.batches(step), hooks.precision, scaler, hooks.add_up)
        hooks.add_up([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(mean):
            raise Diverged(f"step {step}: the loss is {mean}")
        for inner in optimizer.optimizers:
            scaler.unscale_(inner)
        clock.timed("probe", hooks.on_gradients, step)
        norm = grad_norm(parameters, cfg.clip)
        overflows = update(optimizer, scaler, norm, overflows)
        optimizer.zero_grad()
        if overflows > (MAX_OVERFLOWS if scaler.is_enabled() else 0):
            raise Diverged(f"step {step}: the gradient norm is {norm} (loss {mean:.4f})")
        progress.step, progress.tokens = step, progress.tokens + count

        row = {"train/loss": mean, "optim/lr": optimizer.lr * factor, "optim/grad_norm": norm}
        row |= (seen := clock.timed("probe", hooks.observe, step))
        stop = hooks.stop()
        if evaluated := step % cfg.eval_every == 0 or step == cfg.steps:
            row |= clock.timed("outside", hooks.evaluate, step)
        if not math.isfinite(row.get("val/loss", 0.0)):
            finish_row(row)
            raise Diverged(f"step {step}: val/loss is {row['val/loss']}")
        reached = cfg.target_loss is not None and row.get("val/loss", math.inf) <= cfg.target_loss
        if evaluated or seen or stop or step % cfg.log_every == 0:
            finish_row(row)
        clock.timed("outside", hooks.save, progress, stop or reached or step == cfg.steps)
        if stop or reached:
            break
    return progress
