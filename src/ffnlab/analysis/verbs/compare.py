"""Say whether arms differ: runs over seeds against a baseline, with tests, intervals and costs.

RUNS are run directories, or study folders that hold them. Runs of one configuration are an arm, its seeds
the replicates. Verdicts: better or worse (Holm's p below alpha in the model arm + seed), equivalent (two
one-sided tests within the margin), undecided (with the number of seeds that would decide). One seed gives no
verdict.
"""

import argparse
import math
import sys
from pathlib import Path

from ffnlab.analysis import compared, tables
from ffnlab.analysis.compare import MARGIN, Comparison, compare
from ffnlab.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Runs, what to compare, how to say it."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run directories or study folders")
    parser.add_argument("--baseline", metavar="ARM", help="compare with this arm (default: the first)")
    parser.add_argument("--metric", default="val/loss", help="its last value is compared (default val/loss)")
    parser.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help=f"the largest difference that does not matter (default {MARGIN} nats for a loss)",
    )
    parser.add_argument(
        "--alpha", type=float, default=0.05, metavar="X", help="level of the tests (default 0.05)"
    )
    parser.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="KEY",
        help="what makes the arms: ffn, act, optim.lr, ... (default: the sweep's arms, else what differs)",
    )
    parser.add_argument(
        "--target", type=float, metavar="LOSS", help="a loss to come to (default: the baseline's last one)"
    )
    parser.add_argument("--format", choices=("table", "md", "csv", "json"), default="table")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="also draw all runs: FILE.png, .svg, .pdf"
    )


def run(args: argparse.Namespace) -> int:
    check(args)
    comparison = compare(
        args.runs,
        baseline=args.baseline,
        metric=args.metric,
        margin=args.margin,
        alpha=args.alpha,
        by=args.by,
        target=args.target,
    )
    {"table": as_table, "md": as_markdown, "csv": as_csv, "json": as_json}[args.format](comparison)
    if args.figure is not None:
        from ffnlab.analysis.dots import paired_dots
        from ffnlab.analysis.style import as_file
        from ffnlab.record.files import make_folder, write_atomic

        make_folder(args.figure.parent)
        write_atomic(args.figure, as_file(paired_dots(comparison), args.figure.suffix[1:]))
    return 0


def check(args: argparse.Namespace) -> None:
    """All that is wrong with the arguments at once."""
    problems = []
    if not 0 < args.alpha < 1:
        problems.append(f"--alpha {args.alpha}: expected a number between 0 and 1")
    if args.margin is not None and not 0 < args.margin < float("inf"):
        problems.append(f"--margin {args.margin}: expected a number above 0")
    if args.target is not None and not math.isfinite(args.target):
        problems.append(f"--target {args.target}: expected a loss, a finite number")
    if args.figure is not None and args.figure.suffix not in (".png", ".svg", ".pdf"):
        problems.append(f"--figure {args.figure}: expected a name that ends in .png, .svg or .pdf")
    if problems:
        raise UserError(*problems)


def as_table(comparison: Comparison) -> None:
    """For the console."""
    for table in (compared.effects(comparison), compared.spent(comparison)):
        tables.show(table)
        print()
    print("\n".join(said(comparison)))


def as_markdown(comparison: Comparison) -> None:
    """For a README."""
    for table in (compared.effects(comparison), compared.spent(comparison)):
        print(f"**{table.title}**\n\n{tables.markdown(table)}\n")
    print("\n".join(f"- {line}" for line in said(comparison)))


def as_csv(comparison: Comparison) -> None:
    """For a spreadsheet; what is not a row goes to stderr."""
    print(tables.to_csv(compared.flat(comparison)), end="")
    print("\n".join(said(comparison)), file=sys.stderr)


def as_json(comparison: Comparison) -> None:
    """For a program."""
    print(tables.to_json(compared.plain(comparison)))


def said(comparison: Comparison) -> list[str]:
    """Warnings first, then the runs that are missing, then how to read it."""
    unsound = comparison.warnings + compared.wild(comparison) + compared.left_out(comparison)
    warned = [f"warning: {line}" for line in unsound]
    return warned + compared.notes(comparison)
