"""The sparse way through an FFN against the dense one: whole FFN, single products, one token at a time.

The FFN is that of the configuration (default: mlp with relu2) on normal inputs, with a C that lets the wanted
share of the pre-activations through. Every shape, density and precision is a contest of its own, in which
dense and sparse take turns; figures are medians over the rounds, a speed-up is the median of those of each
round.

ffn: forward and backward, and the bytes that wait for the backward pass. The bound is that of the operations
that are left if the sparse products ran at the dense rate: mlp 6 / (1 + 5 p), gated units 9 / (1 + 8 p).
`auto goes` is the way that ffn.kernel=auto would take, by a table timed just before, as it does before a run.
products: each one alone; FLOP/s count what is useful, 2 D for each active pair. Each pair takes a row of D
numbers through the caches: `of L2` is that traffic over what the threads read from L2 at most, measured
first; above 100 % the rows came from L1.
token: one token forward, as in sampling. The bound is that of the bytes: mlp 2 / (1 + p), gated units
3 / (1 + 2 p).
"""

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

from ffnlab import build
from ffnlab.device import DTYPES, choose_device, has_bf16, set_threads
from ffnlab.errors import UserError
from ffnlab.kernels.limits import limits
from ffnlab.kernels.ops import compiled
from ffnlab.nn.crossover import DENSITIES, crossover
from ffnlab.nn.rate import machine
from ffnlab.verbs import mebibytes, show
from ffnlab.verbs.bench.contest import add_contest_arguments, at_least_one, report
from ffnlab.verbs.bench.sparsity import Case, auto_limit

SHAPES = ("384x1536", "768x3072")
TOKENS = 4096
SECTIONS = {
    "ffn": "forward and backward of the whole FFN",
    "products": "single products (compact: with the dense product)",
    "token": "one token forward, as in sampling",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: ffn=reglu ...")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="DxF", help=f"(default {SHAPES})")
    parser.add_argument(
        "--densities", nargs="+", type=float, default=DENSITIES, metavar="P", help=f"(default {DENSITIES})"
    )
    add_contest_arguments(parser)


def run(args: argparse.Namespace) -> int:
    at_least_one(rounds=args.rounds, tokens=args.tokens)
    shapes = [sizes(text) for text in args.shapes]
    if wrong := [p for p in args.densities if not 0 < p < 1]:
        raise UserError(f"--densities {wrong}: expected numbers between 0 and 1")
    cfg, _ = build.compose(["ffn=mlp", *args.overrides])
    device = choose_device(cfg["train"]["device"])
    threads = set_threads(cfg["train"]["threads"], None)
    precisions = ["fp32", "bf16"] if has_bf16(device) else ["fp32"]
    tokens = args.tokens or TOKENS
    bounds = limits(threads) if device.type == "cpu" and compiled() is None else None
    rows = []
    for (d_model, d_ff), precision in itertools.product(shapes, precisions):
        limit = auto_limit(cfg, d_model, d_ff, precision, device, tokens)
        for density in args.densities:
            case = Case(cfg, d_model, d_ff, density, precision, device, tokens, bounds, limit)
            rows += case.rows(args.rounds)
    facts = {
        "machine": machine(device, DTYPES[precisions[-1]]),
        "threads": threads,
        "rounds": args.rounds,
        "tokens": tokens,
        "limits": bounds and bounds._asdict(),
        "rows": rows,
    }
    report(args, facts, present)
    return 0


def sizes(text: str) -> tuple[int, int]:
    """768x3072 -> d_model and d_ff."""
    d_model, _, d_ff = text.partition("x")
    if not (d_model.isdecimal() and d_ff.isdecimal() and int(d_model) and int(d_ff)):
        raise UserError(
            f"--shapes {text}: expected d_model x d_ff, such as 768x3072 (KEY=VALUE goes before the options)"
        )
    return int(d_model), int(d_ff)


def present(facts: Mapping[str, Any]) -> None:
    headers = ("shape", "precision", "density", "", "dense, ms", "sparse, ms", "speed-up", "bound")
    if facts["limits"]:
        l1, l2, flop = facts["limits"].values()
        print(f"L1 {l1 / 1e9:.0f} GB/s, L2 {l2 / 1e9:.0f} GB/s, fp32 {flop / 1e9:.0f} GFLOP/s in registers")
    headers += ("auto goes", "useful GFLOP/s", "of L2", "kept, dense", "kept, sparse")
    for section, title in SECTIONS.items():
        rows = [cells(row) for row in facts["rows"] if row["section"] == section]
        tokens = 1 if section == "token" else facts["tokens"]
        show(f"{title}: tokens {tokens:,}, threads {facts['threads']}", headers, rows)
    print("\n".join(crossovers(facts["rows"])))


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    useful = row["useful_flop_per_s"]
    kept = (row["dense_saved_bytes"], row["sparse_saved_bytes"])
    return (
        row["shape"],
        row["precision"],
        f"{row['density']:g}",
        row["name"],
        *(f"{row[key]:.3g}" for key in ("dense_ms", "sparse_ms")),
        *(f"{row[key]:.2f}" for key in ("speedup", "bound")),
        row["auto"] or "",
        "" if useful is None else f"{useful / 1e9:.0f}",
        "" if row["of_l2"] is None else f"{row['of_l2']:.0%}",
        *("" if each is None else mebibytes(each) for each in kept),
    )


def crossovers(rows: list[dict[str, Any]]) -> list[str]:
    """The density at which both ways take the same time, by interpolation of the logarithms."""
    lines = []
    cases: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in sorted(rows, key=lambda row: row["density"]):
        if row["section"] == "ffn":
            gain = {"density": row["density"], "dense_ms": row["speedup"], "sparse_ms": 1.0}
            cases.setdefault((row["shape"], row["precision"]), []).append(gain)
    for (shape, precision), own in cases.items():
        at = crossover(own)
        always = all(gain["dense_ms"] > 1 for gain in own)
        where = "above all of these" if always else f"{at:.1%}" if at else "below all of these"
        lines.append(f"{shape} {precision}: dense and sparse take the same time at a density of {where}")
    return lines
