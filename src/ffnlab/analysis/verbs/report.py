"""Write one HTML file about some runs: losses, layers, figures, a neuron explorer; it needs no network."""

import argparse
from pathlib import Path

from ffnlab.errors import UserError, unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: report.html in the run directory; needed for several",
    )
    parser.add_argument("--figures", nargs="*", metavar="NAME", help="default: all that the record allows")


def run(args: argparse.Namespace) -> int:
    from ffnlab.analysis.figures import entries
    from ffnlab.analysis.report import report
    from ffnlab.analysis.runs import Run
    from ffnlab.record.files import write_atomic

    if args.out is None and len(args.runs) > 1:
        raise UserError(f"{len(args.runs)} runs: say with --out FILE where their report shall be")
    if wrong := [unknown("figure", name, entries()) for name in args.figures or () if name not in entries()]:
        raise UserError(*wrong)
    runs = [Run(path) for path in args.runs]
    out = args.out or args.runs[0] / "report.html"
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist: make it, or name another")
    write_atomic(out, report(runs, args.figures))
    print(out)
    return 0
