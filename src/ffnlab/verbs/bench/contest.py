"""Contestants that run in turn, so that a busy machine disturbs each of them alike, and what they took."""

import argparse
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ffnlab.device import autocast
from ffnlab.errors import UserError
from ffnlab.nn.count import TRAINING
from ffnlab.nn.memory import LiveBytes
from ffnlab.record.files import write_atomic
from ffnlab.verbs.bench.steps import Stopwatch


@runtime_checkable
class Contestant(Protocol):
    """What `alternate` runs: `warm_up` once, `round` in every round."""

    def warm_up(self) -> None: ...

    def round(self) -> None: ...


def alternate(contestants: Sequence[Contestant], rounds: int) -> None:
    """Every contestant once in each round."""
    for contestant in contestants:
        contestant.warm_up()
    for _ in range(rounds):
        for contestant in contestants:
            contestant.round()


def add_contest_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every bench of parts."""
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default 5)")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="in one pass (default: those of a training batch)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the rows to FILE as well")


def at_least_one(**options: int | None) -> None:
    """Raise one UserError that names all options below 1."""
    wrong = {name: value for name, value in options.items() if value is not None and value < 1}
    if wrong:
        raise UserError(*(f"--{name} {value}: expected at least 1" for name, value in wrong.items()))


def windows(cfg: Mapping[str, Any], tokens: int | None) -> tuple[int, int]:
    """(B, T) of a training batch, or of `tokens` tokens: full windows, or one shorter than a window."""
    batch, window = cfg["train"]["batch_size"], cfg["model"]["seq_len"]
    return (batch, window) if tokens is None else (max(1, tokens // window), min(tokens, window))


@dataclass(frozen=True)
class Times:
    """Seconds of a forward pass and of both, and the matrix rate just before them."""

    forward: float
    both: float
    rate: float


@dataclass
class Part:
    """A part of a model, run forward and backward in every round on another input of the shape of `x`: what
    depends on the data (how many tokens an expert gets) varies as it does in training.

    `forward` returns the output and what else is differentiated (penalties); `flops` are those of a forward
    pass; `product` measures the matrix rate once; `base` is the part that its times are divided by.
    """

    name: str
    module: nn.Module
    forward: Callable[[Tensor], list[Tensor]]
    x: Tensor
    precision: str
    flops: int
    product: Callable[[], float]
    base: "Part | None" = None
    times: list[Times] = field(default_factory=list)
    saved_bytes: int = 0
    peak_bytes: int = 0

    def warm_up(self) -> None:
        """A pass that is not timed: its bytes are counted, those of the parameters left out.

        `saved_bytes` wait for the backward pass, the input among them; `peak_bytes` are the most in use.
        """
        with LiveBytes() as live:
            x = self.x.clone().requires_grad_()
            with autocast(x.device, self.precision)():
                outputs = self.forward(x)
            self.saved_bytes = live.now - sum(output.nbytes for output in outputs)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            self.peak_bytes = live.peak
        self.module.zero_grad()

    def round(self) -> None:
        """Two matrix products and one pass, at the same moment of a machine that may be busy."""
        clock = Stopwatch(self.x.device)
        rate = max(self.product() for _ in range(2))
        x = torch.randn_like(self.x).requires_grad_()
        with autocast(x.device, self.precision)():
            outputs, forward = clock.timed(self.forward, x)
        ones = [torch.ones_like(output) for output in outputs]
        _, backward = clock.timed(torch.autograd.backward, outputs, ones)
        self.module.zero_grad()
        self.times.append(Times(forward, forward + backward, rate))

    def figures(self) -> dict[str, Any]:
        """Medians over the rounds; ratios and shares are medians of those of each round.

        `spread_frac` is the distance of the quartiles of the time of both passes, divided by its median.
        """
        base = self.base or self
        both = [t.both for t in self.times]
        pairs = list(zip(self.times, base.times, strict=True))
        flops = TRAINING * self.flops
        return {
            "forward_ms": 1e3 * median(t.forward for t in self.times),
            "forward_backward_ms": 1e3 * median(both),
            "spread_frac": spread(both),
            "base": base.name,
            "time_ratio": median(t.both / b.both for t, b in pairs),
            "flop_rate_ratio": median((self.flops / t.both) / (base.flops / b.both) for t, b in pairs),
            "matrix_rate_frac": median(flops / t.both / t.rate for t in self.times),
            "parameter_bytes": sum(p.nbytes for p in self.module.parameters()),
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
        }


def spread(values: Sequence[float]) -> float:
    """(third quartile - first quartile) / median; 0 for a single value."""
    if len(values) == 1:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def report(
    args: argparse.Namespace, facts: Mapping[str, Any], present: Callable[[Mapping[str, Any]], None]
) -> None:
    """Print all as JSON if asked for, else as `present` does; write `facts["rows"]` where --csv says.

    What was measured is shown first: nothing is lost where the file cannot be written.
    """
    if args.json:
        print(json.dumps(facts, indent=2), flush=True)
    else:
        present(facts)
    if args.csv:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(facts["rows"][0]))
        writer.writeheader()
        writer.writerows(facts["rows"])
        write_atomic(Path(args.csv), text.getvalue())
