"""Training steps taken apart and timed, by the same functions that training itself runs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ffnlab import build
from ffnlab.config import settings
from ffnlab.device import DTYPES, autocast, choose_precision
from ffnlab.nn.count import TRAINING, count, total
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.nn.rate import product, synchronize
from ffnlab.train import TrainConfig, grad_norm, gradients


@dataclass(frozen=True)
class Times:
    """Seconds of one step: whole, forward pass and loss, backward pass, and each optimizer by name."""

    total: float
    forward: float
    backward: float
    optimizers: dict[str, float]


class Bench:
    """A model of `cfg` in one precision with its own optimizer, on random tokens, and the steps it took."""

    def __init__(self, cfg: Mapping[str, Any], vocab_size: int, device: torch.device, precision: str):
        self.train = settings(TrainConfig, cfg["train"], "train")
        self.device = device
        self.autocast = autocast(device, choose_precision(precision, device))
        self.model = build.model(cfg, vocab_size).to(device)
        if self.train.checkpoint_activations:
            self.model.run_block = run_block_checkpointed
        self.loss = torch.compile(self.model.loss) if self.train.compile else self.model.loss
        self.optimizer = build.optimizer(cfg, self.model)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.product = product(device, DTYPES[precision])
        self.flops = TRAINING * total(count(self.model, self.model.seq_len).values()).flops_per_token
        shape = (self.train.grad_accum, 2, self.train.batch_size, self.model.seq_len)
        tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
        self.micro = [(x, y) for x, y in tokens]
        self.tokens = self.train.grad_accum * self.train.batch_size * self.model.seq_len
        self.on_gradients: Callable[[], None] = lambda: None  # called in every step, outside the clocks
        self.times: list[Times] = []
        self.rates: list[float] = []

    def warm_up(self) -> None:
        """One step that counts for nothing: it makes the optimizer's state and, with `compile`, the code."""
        self.step()

    def round(self) -> None:
        """A few matrix products and one step, at the same moment of a machine that may be busy."""
        self.rates.append(max(self.product() for _ in range(5)))
        self.times.append(self.step())

    def step(self) -> Times:
        """One update, as `train.train` makes it."""
        clock = Stopwatch(self.device)
        forward = 0.0

        def timed_loss(x: Tensor, y: Tensor) -> Tensor:
            nonlocal forward
            out, seconds = clock.timed(self.loss, x, y)
            forward += seconds
            return out

        start = clock.now()
        _, both = clock.timed(gradients, timed_loss, self.micro, self.autocast, self.scaler)
        for inner in self.optimizer.optimizers:
            self.scaler.unscale_(inner)
        before = clock.now()
        self.on_gradients()
        start += clock.now() - before
        grad_norm(self.model.parameters(), self.train.clip)
        optimizers: dict[str, float] = {}
        for inner in self.optimizer.optimizers:
            optimizers[type(inner).__name__] = clock.timed(self.scaler.step, inner)[1]
        self.scaler.update()
        self.optimizer.zero_grad()
        return Times(clock.now() - start, forward, both - forward, optimizers)

    def figures(self) -> dict[str, Any]:
        """Medians over the rounds; `mfu` is the median of (model FLOP/s / matrix rate) of each round."""
        middle = {
            name: median(values)
            for name, values in {
                "step": [t.total for t in self.times],
                "forward": [t.forward for t in self.times],
                "backward": [t.backward for t in self.times],
                "optimizer": [sum(t.optimizers.values()) for t in self.times],
            }.items()
        }
        flops = self.flops * self.tokens
        return {
            "step_ms": 1e3 * middle["step"],
            "forward_ms": 1e3 * middle["forward"],
            "backward_ms": 1e3 * middle["backward"],
            "optimizer_ms": {
                name: 1e3 * median(t.optimizers[name] for t in self.times)
                for name in self.times[0].optimizers
            },
            "rest_ms": 1e3
            * median(t.total - t.forward - t.backward - sum(t.optimizers.values()) for t in self.times),
            "optimizer_frac": middle["optimizer"] / middle["step"],
            "tok_per_s": self.tokens / middle["step"],
            "flops_per_s": flops / middle["step"],
            "matrix_rate_flops_per_s": median(self.rates),
            "mfu": median(flops / t.total / rate for t, rate in zip(self.times, self.rates, strict=True)),
        }


class Stopwatch:
    """Reads the time when the device has done all it was asked."""

    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def timed(self, call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        """What `call` returns, and its seconds."""
        start = self.now()
        out = call(*args)
        return out, self.now() - start
