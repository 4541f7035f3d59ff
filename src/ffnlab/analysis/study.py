"""The frame of a study's `figures.py`: which runs it reads, and where its results go.

results/ lies in the repository, so only runs of the study as its yaml has it may write there. Runs that were
made with other settings (a trial of a few steps, a larger network) are read with --out alone.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from ffnlab.analysis.arms import NOT_THE_ARM, Seed, find, group
from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import as_file
from ffnlab.errors import UserError, plain_warnings, report
from ffnlab.record.files import make_folder, write_atomic

# What a command may say beside `experiment=` without another outcome.
FREE = (*NOT_THE_ARM, "experiment", "hydra", "train.device")


@dataclass(frozen=True)
class Study:
    """Runs of a study, and the folder of its results."""

    runs: Sequence[Run]
    results: Path

    @cached_property
    def arms(self) -> dict[str, dict[Seed, Run]]:
        """arm -> seed -> finished run; never empty."""
        done = [run for run in self.runs if run.info.get("status") == "done"]
        if not done:
            raise UserError(
                f"none of {len(self.runs)} runs is done, such as {self.runs[0].path}: let one end"
            )
        return {arm.name: dict(arm.runs) for arm in group(done, (), hint="")}

    def save(self, name: str, content: str | bytes) -> None:
        """Write a file of the results, and say so."""
        path = self.results / name
        make_folder(self.results)
        write_atomic(path, content)
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

    def draw(self, name: str, picture: Figure, dpi: float) -> None:
        """Write a figure of the results as PNG, and say so."""
        self.save(name, as_file(picture, "png", dpi))


def script(file: str, about: str | None, main: Callable[[Study], object]) -> None:
    """Run the `main` of a study's figures.py; what a user can mend is one message and exit code 1."""
    folder = Path(file).resolve().parent
    name = f"experiments/{folder.name}/figures.py"
    parser = argparse.ArgumentParser(prog=name, description=about)
    runs = Path("outputs") / folder.name
    parser.add_argument("runs", nargs="?", type=Path, default=runs, help=f"folder of runs (default {runs})")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="instead of results/ of the study; then runs of any settings"
    )
    args = parser.parse_args()
    plain_warnings()
    try:
        main(opened(folder, args.runs, args.out))
    except UserError as error:
        sys.exit(report(error.problems, name))


def opened(folder: Path, runs: Path, out: Path | None) -> Study:
    """The study of a folder experiments/NAME with the runs in `runs`: those of its own settings, or all of
    them where the results go elsewhere.
    """
    if not runs.exists():
        raise UserError(
            f"{runs} does not exist: make its runs with `python train.py experiment={folder.name}`"
        )
    found, results = find([runs]), folder / "results"
    if out is not None and out.resolve() != results:
        return Study(found, out.resolve())
    arms = arms_of(folder)
    foreign = {run.path: words for run in found if (words := changed(run, folder.name, arms))}
    made_with = " ".join(dict.fromkeys(word for words in foreign.values() for word in words))
    own = [run for run in found if run.path not in foreign]
    if not own:
        raise UserError(
            f"{runs}: none of its {len(found)} runs has the study's own settings, for which "
            f"experiments/{folder.name}/results/ is (made with {made_with}). Give these another folder: "
            f"python experiments/{folder.name}/figures.py {runs} --out DIR"
        )
    if foreign:
        print(
            f"left out {len(foreign)} runs with other settings than the study's: {made_with}", file=sys.stderr
        )
    return Study(own, results)


def arms_of(folder: Path) -> dict[str, list[str]]:
    """The arms of a study and what each overrides, as configs/experiment/NAME.yaml has them."""
    file = folder.parents[1] / f"configs/experiment/{folder.name}.yaml"
    sweeper = yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["sweeper"]
    return {str(arm): list(overrides) for arm, overrides in sweeper["arms"].items()}


def changed(run: Run, study: str, arms: Mapping[str, Sequence[str]]) -> list[str]:
    """What the command of a run says beside the study and its arm, and that changes what comes out."""
    command, own = (
        [str(word) for word in run.info.get("command", [])],
        arms.get(str(run.config.get("arm")), ()),
    )
    if not command:
        return []
    said = [word for word in command[1:] if re.match(r"[+~]*[A-Za-z_][\w./@]*=", word) and word not in own]
    other = [word for word in said if not re.match(rf"[+~]*({'|'.join(map(re.escape, FREE))})[./=]", word)]
    return other if f"experiment={study}" in command else [f"no experiment={study}", *other]
