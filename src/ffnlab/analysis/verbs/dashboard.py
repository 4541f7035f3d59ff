"""Make a W&B workspace and a W&B report of runs: curves by arm, active fraction and C by layer, sparsity.

RUNS are run directories, or study folders that hold them, whose runs W&B has (online runs, or `ffnlab sync`).
Shown is what they recorded, grouped by the arms of the study; later runs of the same W&B group join them.
Every call makes a new workspace and a new report, and prints their addresses. With --json nothing is sent.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ffnlab.analysis.arms import differing, find
from ffnlab.analysis.runs import Run
from ffnlab.errors import UserError
from ffnlab.record import dashboard
from ffnlab.record.dashboard import Contents
from ffnlab.record.files import write_atomic

LOSSES = ("train/loss", "val/loss")  # the last one is what runs are judged by
AXES = 8  # of the parallel coordinates: more cannot be read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run directories or study folders")
    parser.add_argument("--project", metavar="NAME", help="of W&B (default: the runs' own)")
    parser.add_argument("--entity", metavar="NAME", help="of W&B (default: the runs' own, else the key's)")
    parser.add_argument("--title", metavar="TEXT", help="default: the study")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what would be sent, and send nothing"
    )


def run(args: argparse.Namespace) -> int:
    runs = find(args.runs)
    dashboard.require()
    contents = read(runs, args.project, args.entity, args.title)
    if args.json is not None:
        write_atomic(args.json, json.dumps(dashboard.spec(contents), indent=2) + "\n")
        print(f"written: {args.json}")
        return 0
    for name, url in dashboard.save(contents).items():
        print(f"{name}: {url}")
    return 0


def read(runs: Sequence[Run], project: str | None, entity: str | None, title: str | None) -> Contents:
    """What the runs have in common, and what they recorded. UserError when it makes no dashboard."""
    losses = [name for name in LOSSES if any(run.keys(name) for run in runs)]
    problems = [] if losses else ["none of the runs has recorded a loss"]
    projects = {project} if project else {p for run in runs if (p := of_logger(run, "project"))}
    if not projects:
        problems.append(
            "none of the runs names a W&B project (they had another logger, or none): send them with "
            "`ffnlab sync RUN... --project NAME`, then say --project NAME here"
        )
    if len(projects) > 1:
        problems.append(f"the runs lie in several W&B projects, {', '.join(sorted(projects))}: say --project")
    if problems:
        raise UserError(*problems)
    group = the_only({of_logger(run, "group") or run.config.get("study") for run in runs})
    differ = [key for key in differing(runs) if key != "arm"]
    by_name = all(run.config.get("arm") for run in runs)
    arms = ["arm"] if by_name else differ[:1]
    return Contents(
        title=title or group or runs[0].name,
        entity=entity or the_only({of_logger(run, "entity") for run in runs}) or "",
        project=projects.pop(),
        group=group if re.fullmatch(r"[\w.-]+", group or "") else None,  # the library quotes no others
        ids=[str(run.info.get("id")) for run in runs],
        arms=arms,
        losses=losses,
        active=layered(runs, r"probe/activity/L\d+\w*/active_frac"),
        thresholds=layered(runs, r"probe/threshold/L\d+\w*/c"),
        varied=differ[:AXES],
        text=f"{len(runs)} runs when this was made. Lines are means over the seeds of an arm; whether arms "
        "differ, `ffnlab compare` says.",
    )


def of_logger(run: Run, key: str) -> str | None:
    """A setting of the run's W&B logger; None where it had another, or none."""
    return (run.config.get("logger") or {}).get(key)


def the_only(values: set[str | None]) -> str | None:
    """The one value that all runs have."""
    return values.pop() if len(values) == 1 else None


def layered(runs: Sequence[Run], pattern: str) -> list[str]:
    """The metrics of all runs that match, in the order of the layers."""
    return sorted({key for run in runs for key in run.keys(pattern)})
