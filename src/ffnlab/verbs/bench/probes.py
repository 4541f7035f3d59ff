"""What each probe costs, and its share of a run's time: timed one by one, beside the step that they watch."""

import argparse
import json
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from ffnlab import build
from ffnlab.data.dataset import probe_mask
from ffnlab.device import choose_device, choose_precision, set_threads
from ffnlab.errors import UserError
from ffnlab.probe import Observer
from ffnlab.validate import validate
from ffnlab.verbs import show, vocabulary
from ffnlab.verbs.bench.steps import Bench

WINDOWS = 4  # of the probe batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="instead of the data's")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="steps and looks (default 5)")


def run(args: argparse.Namespace) -> int:
    """Training step, look and scan in turn, so that a busy machine disturbs each of them alike."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: expected at least 1")
    cfg, _ = build.compose(args.overrides)
    validate(cfg)
    device = choose_device(cfg["train"]["device"])
    threads = set_threads(cfg["train"]["threads"], None)
    precision = choose_precision(cfg["train"]["precision"], device)
    bench = Bench(cfg, vocabulary(cfg, args.vocab_size), device, precision)
    observer = observe(cfg, bench)
    figures = measure(bench, observer, args.rounds)
    eval_every, steps = cfg["train"]["eval_every"], cfg["train"]["steps"]
    scans = len({*range(0, steps + 1, eval_every), steps}) if observer.scan_tokens is not None else 0
    rows = shares(observer, figures, scans)
    facts = {
        "step_ms": figures["step"],
        "tokens": bench.tokens,
        "steps": steps,
        "threads": threads,
        "probes": rows,
    }
    print(json.dumps(facts, indent=2)) if args.json else present(facts)
    return 0


def observe(cfg: Mapping[str, Any], bench: Bench) -> Observer:
    """The probes of `cfg` on the model of `bench`, on random tokens at the places of a run's."""
    settings = build.probe_settings(cfg)
    seq_len, random = bench.model.seq_len, torch.Generator().manual_seed(1)
    windows = -(-settings.scan_tokens // seq_len)
    tokens = torch.randint(bench.model.vocab_size, (WINDOWS + windows, seq_len), generator=random)
    used = min(WINDOWS, settings.tokens)
    return Observer(
        bench.model,
        build.probes(cfg),
        settings,
        steps=cfg["train"]["steps"],
        batch=(tokens[:used], probe_mask(settings.tokens, used, seq_len)),
        scan=tokens[WINDOWS:] if windows else None,
        autocast=bench.autocast,
    )


def measure(bench: Bench, observer: Observer, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step, and of each probe in a look at the probe batch and in a scan."""
    bench.on_gradients = lambda: observer.on_gradients(0)  # at step 0 every probe is due
    looks: list[dict[str, float]] = []
    scans: list[dict[str, float]] = []
    for each in range(rounds + 1):  # the first one is a warm-up
        before = dict(observer.cost)
        bench.step() if each == 0 else bench.round()
        gradients = spent(observer, before)
        looks.append(timed(observer, observer.observe, gradients))
        scans.append(timed(observer, observer.scan, {}))

    def middle(found: list[dict[str, float]], name: str) -> float:
        return 1e3 * median(each[name] for each in found[1:])

    return {
        "step": 1e3 * median(times.total for times in bench.times),
        "look": {name: middle(looks, name) for name in observer.cost},
        "scan": {name: middle(scans, name) for name in observer.cost},
    }


def timed(observer: Observer, look: Callable[[int], Any], plus: dict[str, float]) -> dict[str, float]:
    """Seconds of one look or scan by probe, with what the probe spent on it before."""
    before = dict(observer.cost)
    look(0)
    return {name: seconds + plus.get(name, 0.0) for name, seconds in spent(observer, before).items()}


def spent(observer: Observer, before: dict[str, float]) -> dict[str, float]:
    return {name: seconds - before[name] for name, seconds in observer.cost.items()}


def shares(observer: Observer, figures: dict[str, Any], scans: int) -> dict[str, dict[str, float]]:
    """What each probe takes of a run's training steps and probes at the configured cadence; `forward` are
    the passes that they share.
    """
    due = {name: observer.looks(name) for name in observer.probes}
    due["forward"] = set().union(*(due[name] for name, sites in observer.sites.items() if sites))
    look, scan = figures["look"], figures["scan"]
    taken = {name: len(due[name]) * look[name] + scans * scan[name] for name in look}
    whole = observer.steps * figures["step"] + sum(taken.values())
    return {
        name: {
            "look_ms": look[name],
            "looks": len(due[name]),
            "scan_ms": scan[name],
            "scans": scans,
            "share": taken[name] / whole,
        }
        for name in look
    }


def present(facts: dict[str, Any]) -> None:
    """The figures as a table: a row per probe."""
    rows = facts["probes"]
    show(
        f"{facts['steps']} steps of {facts['tokens']:,} tokens, {facts['step_ms']:.0f} ms each, "
        f"{facts['threads']} threads; medians",
        ("probe", "look, ms", "looks", "scan, ms", "scans", "share"),
        [
            (
                name,
                f"{row['look_ms']:.2f}",
                f"{row['looks']}",
                f"{row['scan_ms']:.1f}",
                f"{row['scans']}",
                f"{row['share']:.2%}",
            )
            for name, row in rows.items()
        ],
    )
    total = sum(row["share"] for row in rows.values())
    print(f"The probes take {total:.1%} of the time of training steps and probes; evaluation is not in it.")
