"""Measure how fast this machine trains, what sparsity pays, what probes cost, its matrix rate, a start."""

import argparse

from ffnlab.verbs.bench import ffn, gemm, probes, shapes, sparse, startup, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for module in (train, ffn, sparse, shapes, probes, gemm, startup):
        text = module.__doc__ or ""
        each = what.add_parser(
            module.__name__.rpartition(".")[2],
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(each)
        each.add_argument("--json", action="store_true", help="print one JSON object")
        each.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    return args.bench(args)
