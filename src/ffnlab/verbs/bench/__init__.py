"""Measure how fast this machine trains, what probes cost, its matrix-product rate, or the start of a run."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ffnlab import build
from ffnlab.data import cache_dir
from ffnlab.device import DTYPES, choose_device, has_bf16, set_threads
from ffnlab.errors import UserError
from ffnlab.nn.rate import machine, measure, remember
from ffnlab.validate import validate
from ffnlab.verbs import quantity, show, vocabulary
from ffnlab.verbs.bench import probes
from ffnlab.verbs.bench.steps import Bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    probes.add_parser(what)
    train = what.add_parser("train", help="training steps, in fp32 and bf16, against the matrix-product rate")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    train.add_argument("--vocab-size", type=int, metavar="N", help="instead of the data's")
    train.add_argument("--rounds", type=int, default=5, metavar="N", help="steps of each kind (default 5)")
    train.add_argument(
        "--precision", nargs="+", choices=sorted(DTYPES), help="default: fp32, and bf16 if present"
    )
    train.set_defaults(bench=bench_train)
    gemm = what.add_parser(
        "gemm", help="the matrix-product rate; runs are compared with the fastest seen here"
    )
    gemm.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    gemm.set_defaults(bench=bench_gemm)
    startup = what.add_parser("startup", help="seconds from the command to the first step of train.py")
    startup.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    startup.set_defaults(bench=bench_startup)
    for each in (train, gemm, startup):
        each.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return args.bench(args)


def bench_train(args: argparse.Namespace) -> int:
    """Steps of all precisions in turn, so that a busy machine disturbs each of them alike."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: expected at least 1")
    cfg, _ = build.compose(args.overrides)
    validate(cfg)
    device = choose_device(cfg["train"]["device"])
    threads = set_threads(cfg["train"]["threads"], None)
    present = ("fp32", "bf16") if has_bf16(device) else ("fp32",)
    vocab_size = vocabulary(cfg, args.vocab_size)
    benches = {name: Bench(cfg, vocab_size, device, name) for name in args.precision or present}
    for bench in benches.values():
        bench.warm_up()
    for _ in range(args.rounds):
        for bench in benches.values():
            bench.round()
    figures = {name: bench.figures() for name, bench in benches.items()}
    facts = {"machine": machine(device, DTYPES["fp32"]), "threads": threads, "rounds": args.rounds, **figures}
    if "fp32" in benches:
        facts["speed_up"] = {
            name: speed_up(benches["fp32"], b) for name, b in benches.items() if name != "fp32"
        }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        present_train(facts, figures)
    return 0


def speed_up(base: Bench, other: Bench) -> float:
    """Median over the rounds of (seconds of a step of `base`) / (seconds of a step of `other`)."""
    return median(a.total / b.total for a, b in zip(base.times, other.times, strict=True))


def present_train(facts: dict[str, Any], figures: dict[str, dict[str, Any]]) -> None:
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


def bench_gemm(args: argparse.Namespace) -> int:
    """The rate of this moment, and the fastest ever measured here, with which runs are compared."""
    device = choose_device(args.device)
    dtypes = [DTYPES["fp32"], *([DTYPES["bf16"]] if has_bf16(device) else [])]
    rates = {}
    for dtype in dtypes:
        now = measure(device, dtype)
        kept = remember(cache_dir(), device, dtype, now)
        rates[str(dtype).removeprefix("torch.")] = {"now_flops_per_s": now, "kept_flops_per_s": kept}
    if args.json:
        print(json.dumps({"machine": machine(device, dtypes[0]), "rates": rates}, indent=2))
    else:
        rows = [
            (name, quantity(r["now_flops_per_s"], "FLOP/s"), quantity(r["kept_flops_per_s"], "FLOP/s"))
            for name, r in rates.items()
        ]
        show(machine(device, dtypes[0]), ("matrix product", "now", "kept"), rows)
    return 0


def bench_startup(args: argparse.Namespace) -> int:
    """Start train.py in the current folder for one step, and time it until that step is on record."""
    if not Path("train.py").is_file():
        raise UserError(
            "bench startup runs ./train.py, and this folder has none: run it in a checkout of ffnlab"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        extra = ("logger=none", "train.steps=1", "train.eval_batches=1", f"out={out}")
        command = (sys.executable, "train.py", *args.overrides, *extra)
        start = time.perf_counter()
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            while (running := process.poll() is None) and not has_step(out / "metrics.jsonl", 1):
                time.sleep(0.02)
            seconds = time.perf_counter() - start
            code = process.wait()
            if not running and not has_step(out / "metrics.jsonl", 1):
                errors.seek(0)
                lines = errors.read().splitlines()
                raise UserError(f"train.py made no step (exit code {code}):", *lines[-20:])
    if args.json:
        print(json.dumps({"startup_s": seconds}))
    else:
        print(f"{seconds:.1f} s from the command to the end of the first step")
    return 0


def has_step(metrics: Path, step: int) -> bool:
    """Whether the record holds the row of `step`."""
    try:
        return any(f'"step": {step},' in line for line in metrics.read_text().splitlines())
    except OSError:
        return False
