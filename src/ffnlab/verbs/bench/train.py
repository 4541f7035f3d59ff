"""Training steps of a configuration, in fp32 and bf16, against the matrix-product rate."""

import argparse
import json
from statistics import median
from typing import Any

from ffnlab import build
from ffnlab.device import DTYPES, choose_device, has_bf16, set_threads
from ffnlab.nn.rate import machine
from ffnlab.validate import validate
from ffnlab.verbs import quantity, show, vocabulary
from ffnlab.verbs.bench.contest import alternate, at_least_one
from ffnlab.verbs.bench.steps import Bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="instead of the data's")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="steps of each kind (default 5)")
    parser.add_argument(
        "--precision", nargs="+", choices=sorted(DTYPES), help="default: fp32, and bf16 if present"
    )


def run(args: argparse.Namespace) -> int:
    """Steps of all precisions in turn, so that a busy machine disturbs each of them alike."""
    at_least_one(rounds=args.rounds)
    cfg, _ = build.compose(args.overrides)
    validate(cfg)
    device = choose_device(cfg["train"]["device"])
    threads = set_threads(cfg["train"]["threads"], None)
    present = ("fp32", "bf16") if has_bf16(device) else ("fp32",)
    vocab_size = vocabulary(cfg, args.vocab_size)
    benches = {name: Bench(cfg, vocab_size, device, name) for name in args.precision or present}
    alternate(list(benches.values()), args.rounds)
    figures = {name: bench.figures() for name, bench in benches.items()}
    facts = {"machine": machine(device, DTYPES["fp32"]), "threads": threads, "rounds": args.rounds, **figures}
    if "fp32" in benches:
        facts["speed_up"] = {
            name: speed_up(benches["fp32"], b) for name, b in benches.items() if name != "fp32"
        }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        present_figures(facts, figures)
    return 0


def speed_up(base: Bench, other: Bench) -> float:
    """Median over the rounds of (seconds of a step of `base`) / (seconds of a step of `other`)."""
    return median(a.total / b.total for a, b in zip(base.times, other.times, strict=True))


def present_figures(facts: dict[str, Any], figures: dict[str, dict[str, Any]]) -> None:
    """The figures of `bench train` as a table: a column per precision."""

    def row(name: str, key: str, form: str = "{:.1f}") -> tuple[str, ...]:
        return (name, *(form.format(f[key]) for f in figures.values()))

    optimizers = sorted({name for f in figures.values() for name in f["optimizer_ms"]})
    rows = [
        row("step, ms", "step_ms"),
        row("  forward", "forward_ms"),
        row("  backward", "backward_ms"),
        *(
            (f"  {name}", *(f"{f['optimizer_ms'].get(name, 0.0):.1f}" for f in figures.values()))
            for name in optimizers
        ),
        row("  clipping and rest", "rest_ms"),
        row("optimizer, share of step", "optimizer_frac", "{:.1%}"),
        row("tokens/s", "tok_per_s", "{:,.0f}"),
        ("model FLOP/s", *(quantity(f["flops_per_s"]) for f in figures.values())),
        ("matrix-product FLOP/s", *(quantity(f["matrix_rate_flops_per_s"]) for f in figures.values())),
        row("fraction of that rate", "mfu", "{:.1%}"),
    ]
    show(f"{facts['rounds']} steps each, {facts['threads']} threads, medians", ("", *figures), rows)
    for name, factor in facts.get("speed_up", {}).items():
        print(f"{name} is {factor:.2f} times as fast as fp32 (median of the rounds).")
