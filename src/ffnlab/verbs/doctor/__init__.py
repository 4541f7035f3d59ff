"""Examine a configuration or a run: activations, gradients, updates, precision, course; with remedies.

Prints a table of checks with what was measured, what is expected, and a verdict: ok; look (unusual, may be
meant); bad (training suffers from it). Below it stands a remedy for each that is not ok. Nothing is changed
or written: what is trained for a step or two is a copy.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ffnlab.errors import UserError
from ffnlab.record.runs import no_run
from ffnlab.verbs import show

if TYPE_CHECKING:
    from ffnlab.verbs.doctor.finding import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="*", metavar="KEY=VALUE | RUN", help="as for train.py, or one run directory"
    )
    parser.add_argument("--all", action="store_true", help="every layer and parameter, not the worst alone")
    parser.add_argument("--lr-range", action="store_true", help="also a learning-rate range test (40 steps)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all of them")
    parser.add_argument(
        "--plugins", nargs="+", default=[], metavar="PACKAGE", help="packages whose code the run may use"
    )


def run(args: argparse.Namespace) -> int:
    from ffnlab.verbs.doctor.finding import worst

    path, args.overrides = sort_out(
        args.what
    )  # overrides: what the command line explains when they are wrong
    title, findings = diagnose(path, args.overrides, args.plugins, lr_range=args.lr_range)
    if args.json:
        print(json.dumps({"subject": title, "findings": [finding.plain() for finding in findings]}, indent=2))
    else:
        present(title, findings if args.all else worst(findings))
    return 0


def sort_out(what: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The run directory, or the overrides."""
    folders = [word for word in what if "=" not in word and not word.startswith("~")]
    if not folders:
        return None, [*what]
    missing = [word for word in folders if not os.path.isdir(word)]
    if missing:
        raise UserError(*(f"{no_run(Path(word))}, or overrides as for it: KEY=VALUE" for word in missing))
    if len(what) > 1:
        raise UserError(
            f"{' '.join(what)}: expected either one run directory, whose configuration is its own, or "
            "overrides KEY=VALUE"
        )
    return Path(folders[0]), []


def diagnose(
    path: Path | None, overrides: Sequence[str], plugins: Sequence[str], *, lr_range: bool
) -> tuple[str, list["Finding"]]:
    """What is examined, and all that is found."""
    from ffnlab.verbs.doctor import course, neurons, stress, trial
    from ffnlab.verbs.doctor import lr_range as rates
    from ffnlab.verbs.doctor.subject import at_start, of_run

    subject = at_start(overrides) if path is None else of_run(path, plugins)
    findings = [] if path is None else [*course.check(path, subject.cfg)]
    for check in (neurons.check, trial.check, stress.check, *([rates.check] if lr_range else [])):
        findings += check(subject)
    return subject.title, findings


def present(title: str, findings: Sequence["Finding"]) -> None:
    """The table, a remedy for each finding that is not ok, and the count of the verdicts."""
    rows = [(f.check, f.where, f.measured, f.expected, f.verdict) for f in findings]
    show(title, ("check", "where", "measured", "expected", "verdict"), rows)
    print()
    for finding in findings:
        if finding.remedy:
            print(f"{finding.verdict}: {finding.check}, {finding.where}: {finding.remedy}")
    count = Counter(finding.verdict for finding in findings)
    print(", ".join(f"{count[verdict]} {verdict}" for verdict in ("ok", "look", "bad")))
