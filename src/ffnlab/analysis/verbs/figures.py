"""Draw the figures of a run from its record: loss, activity, thresholds, neurons followed through training.

Without names, all that the record allows, into RUN/figures; captions.json there says what each one shows.
"""

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ffnlab.errors import UserError, unknown

if TYPE_CHECKING:
    from ffnlab.analysis.figures import Missing
    from ffnlab.analysis.runs import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run directory: outputs/first")
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; --list says which there are")
    parser.add_argument("--format", choices=("png", "svg", "pdf", "gif"), help="png; moving pictures gif")
    parser.add_argument("--layer", nargs="+", action="extend", metavar="L03", help="these layers only")
    parser.add_argument(
        "--neuron", type=int, metavar="N", help="the neuron that single-neuron figures follow"
    )
    parser.add_argument(
        "--token", nargs="+", action="extend", type=int, metavar="N", help="places in the probe batch"
    )
    parser.add_argument("--act", metavar="A", help="geometry with another activation than the run's")
    parser.add_argument("--c", type=float, metavar="C", help="geometry with another threshold than the run's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of RUN/figures")
    parser.add_argument("--list", action="store_true", help="say which figures there are")


def run(args: argparse.Namespace) -> int:
    from ffnlab.analysis.figures import Options, entries
    from ffnlab.analysis.health import ailing
    from ffnlab.analysis.pictures import draw
    from ffnlab.analysis.runs import Run

    known = entries()
    if args.list:
        print("\n".join(f"{name:<22} {entry.shows}" for name, entry in known.items()))
        return 0
    if args.run is None:
        raise UserError("give a run directory: ffnlab figures outputs/first (--list says what can be drawn)")
    source = Run(args.run)
    problems = [unknown("figure", name, known) for name in args.names if name not in known]
    problems += unknown_layers(source, args.layer or ())
    if problems:
        raise UserError(*problems)
    options = Options(
        layers=tuple(args.layer) if args.layer else None,
        neuron=args.neuron,
        tokens=tuple(args.token) if args.token else None,
        act=args.act,
        c=args.c,
    )
    if problem := ailing(source):
        warnings.warn(f"{source.path}: {problem}", stacklevel=2)
    folder = args.out or args.run / "figures"
    paths, missing = draw(source, args.names or known, options, folder, args.format)
    for path in paths:
        print(path)
    if args.names and missing:
        raise UserError(*(f"{name}: {error}" for name, error in missing.items()))
    if missing:
        print(f"not drawn: {'; '.join(lacking(missing))}")
    return 0


def unknown_layers(source: "Run", asked: "list[str] | tuple[str, ...]") -> list[str]:
    """The layers asked for that the run has not."""
    from ffnlab.analysis.runs import LAYER

    words = [word for name in (*source.keys("probe/.*"), *source.groups) for word in name.split("/")]
    layers = {word for word in words if LAYER.fullmatch(word)}
    return [unknown("layer", layer, layers) for layer in asked if layer not in layers]


def lacking(missing: "Mapping[str, Missing]") -> list[str]:
    """Figures with what to record for them: 'lineage, neuron_trace (probe=[default,trace])'."""
    together: dict[str, list[str]] = {}
    for name, error in missing.items():
        together.setdefault(error.record or str(error), []).append(name)
    return [f"{', '.join(names)} ({record})" for record, names in together.items()]
