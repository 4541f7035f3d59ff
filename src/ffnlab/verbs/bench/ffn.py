"""Every FFN and every activation forward and backward: time, bytes, ratio to mlp at matched parameters.

Further rows: E76, one expression of F.linear and F.gelu against separate modules (time and bytes in use: in
eager mode both allocate the same); E77, half precision against fp32; E78, activation checkpointing of a block
of norm and FFN, as train.checkpoint_activations does it (time against saved bytes).

All rows take turns in every round. Figures are medians over the rounds; x is the time divided by that of the
row's base in the same round; the spread is that of the quartiles. The rate is that of matrix products just
before each pass. Saved bytes wait for the backward pass, the input among them; the peak is of both passes.
Widths are matched to mlp by parameters (ffn.match=... to change that).
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from ffnlab import build
from ffnlab.config import config_dir
from ffnlab.device import DTYPES, choose_device, choose_precision, set_threads
from ffnlab.errors import UserError, unknown
from ffnlab.explain import Tree, config_loader
from ffnlab.nn.rate import machine
from ffnlab.validate import validate
from ffnlab.verbs import mebibytes, show
from ffnlab.verbs.bench.contest import add_contest_arguments, alternate, at_least_one, report
from ffnlab.verbs.bench.entries import Entries

TITLES = {
    "variants": "FFN variants",
    "activations": "activations, in mlp and in a gated unit",
    "one_call": "E76: one expression of F.linear and F.gelu against separate modules",
    "precision": "E77: half precision against fp32",
    "checkpointing": "E78: activation checkpointing of a block of norm and FFN",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: model=small ffn.expansion=2 ..."
    )
    parser.add_argument("--variants", nargs="*", metavar="FFN", help="choices of ffn= (default: all)")
    parser.add_argument(
        "--acts", nargs="*", metavar="ACT", help="choices of act= (default: all; none with --variants)"
    )
    add_contest_arguments(parser)


def run(args: argparse.Namespace) -> int:
    at_least_one(rounds=args.rounds, tokens=args.tokens)
    variants, acts = chosen(args)
    cfg, _ = build.compose(args.overrides)
    validate(cfg)
    device = choose_device(cfg["train"]["device"])
    precision = choose_precision(cfg["train"]["precision"], device)
    threads = set_threads(cfg["train"]["threads"], None)
    torch.manual_seed(0)
    entries = Entries(args.overrides, device, precision, args.tokens)
    sections = {
        "variants": entries.variants(variants),
        "activations": entries.activations(acts),
        "one_call": entries.one_call(),
        "precision": entries.precisions(),
        "checkpointing": entries.checkpointing(),
    }
    alternate([part for parts in sections.values() for part in parts], args.rounds)
    rows = [
        {"section": section, "name": part.name, **entries.facts(part), **part.figures()}
        for section, parts in sections.items()
        for part in parts
    ]
    facts = {
        "machine": machine(device, DTYPES[precision]),
        "threads": threads,
        "rounds": args.rounds,
        "tokens": entries.x.shape[:-1].numel(),
        "d_model": entries.x.shape[-1],
        "rows": rows,
    }
    report(args, facts, present)
    return 0


def chosen(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The FFNs and the activations to run; mlp, which all are compared with, always among the former."""
    problems = [
        f"{line}: bench ffn compares them; choose with --variants and --acts"
        for line in args.overrides
        if line.startswith(("ffn=", "act="))
    ]
    search = [line for line in args.overrides if line.startswith("hydra.searchpath=")]
    tree = Tree(config_loader(config_dir()), search)
    ffns = [name for name in tree.options("ffn") if name != "none"]
    acts = tree.options("act")
    problems += [unknown("FFN", name, ffns) for name in args.variants or () if name not in ffns]
    problems += [unknown("activation", name, acts) for name in args.acts or () if name not in acts]
    if problems:
        raise UserError(*problems)
    everything = args.variants is None and args.acts is None
    variants = ffns if everything else args.variants or []
    return list(dict.fromkeys(["mlp", *variants])), acts if everything else args.acts or []


def present(facts: Mapping[str, Any]) -> None:
    """A table for every section, and the share of the dense rate that a mixture of experts reaches."""
    print(
        f"{facts['tokens']:,} tokens x {facts['d_model']}, {facts['threads']} threads, "
        f"medians of {facts['rounds']} rounds in turn\n"
    )
    headers = ("", "d_ff", "forward", "both, ms", "spread", "x", "of base", "of rate")
    headers += ("parameters", "saved", "peak")
    for section, title in TITLES.items():
        if rows := [row for row in facts["rows"] if row["section"] == section]:
            show(title, headers, [line(row) for row in rows])
            print()
    for row in facts["rows"]:
        if row["section"] == "variants" and row["experts"]:
            print(
                f"{row['name']}, {row['experts']} experts, top {row['top_k']}: "
                f"{row['flop_rate_ratio']:.0%} of the FLOP rate of mlp"
            )


def line(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        str(row["d_ff"]),
        f"{row['forward_ms']:.1f}",
        f"{row['forward_backward_ms']:.1f}",
        f"{row['spread_frac']:.0%}",
        f"{row['time_ratio']:.2f}",
        row["base"],
        f"{row['matrix_rate_frac']:.0%}",
        mebibytes(row["parameter_bytes"]),
        mebibytes(row["saved_bytes"]),
        mebibytes(row["peak_bytes"]),
    )
