"""docs/claims.md: every claim has its row, and what a row names is there."""

import argparse
import ast
import importlib
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from ffnlab import build, cli
from ffnlab.analysis.figures import entries
from ffnlab.validate import validate
from hydra_plugins.ffnlab_sweep._jobs import expand

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "claims.md"
TEXT = PAGE.read_text(encoding="utf-8")
CLAIMS = 107
# What an outcome begins with, and what the lead calls it.
KINDS = {
    r"proved by the test\b": "are proved by a test",
    r"\[\w+\]\(\.\./experiments/\w+/README\.md\): ": "are measured in a study",
    r"not measured yet\b": "have a command and no measurement yet",
    r"no way yet: \w+": "have no way yet",
}
TEST, STUDY, OPEN, NONE = KINDS


class Row(NamedTuple):
    number: int
    claim: str
    command: str
    outcome: str

    @property
    def kind(self) -> str:
        return next((kind for kind in KINDS if re.match(kind, self.outcome)), "")

    def spans(self, beginning: str) -> list[str]:
        """What stands in code in this row and begins so, an outcome's further commands too."""
        return [code for code in re.findall(r"`([^`]+)`", " ".join(self[1:])) if code.startswith(beginning)]


ROW = re.compile(r"^\| E(\d+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = [Row(int(number), *cells) for number, *cells in ROW.findall(TEXT)]


def once(beginning: str) -> list[str]:
    """All commands of the page that begin so, each once."""
    return list(dict.fromkeys(code for row in ROWS for code in row.spans(beginning)))


TRAINS = once("python train.py")


def compose(overrides: Sequence[str]) -> None:
    cfg, _ = build.compose(list(overrides))
    validate(cfg)


def jobs(command: str) -> list[list[str]]:
    """What `python train.py ...` runs, as lists of overrides; one seed of each arm."""
    words = shlex.split(command)[2:]
    given = [word for word in words if word != "-m"]
    study = [word for word in given if word.startswith("experiment=")]
    if given == words and not study:
        return [given]
    params, arms = {}, {}
    if study:
        file = ROOT / f"configs/experiment/{study[0].partition('=')[2]}.yaml"
        sweeper = yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["sweeper"]
        params, arms = sweeper.get("params", {}), sweeper["arms"]
    found = expand([word for word in given if word not in study], params, arms)
    return [[*study, *job.overrides] for job in {job.label: job for job in found}.values()]


def parsed(command: str) -> argparse.Namespace:
    """The arguments of a command of ffnlab, as its own parser reads them."""
    verb, *words = shlex.split(command)[1:]
    known = cli.verbs()
    assert verb in known, f"{command}: {verb} is no verb"
    parser = argparse.ArgumentParser(prog=command, exit_on_error=False)
    importlib.import_module(known[verb].module).add_arguments(parser)
    return parser.parse_args(words)


def functions(path: Path) -> set[str]:
    """The tests of a file, by NAME or Class::NAME."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inner if isinstance(each, ast.FunctionDef)}
    return found


def anchors(path: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_claim_has_one_row_in_order() -> None:
    assert [row.number for row in ROWS] == list(range(1, CLAIMS + 1))
    # A row that the pattern misses would be missing above, one without a number would not.
    assert TEXT.count("\n| ") == CLAIMS + TEXT.count("\n| | claim or question | command | outcome |\n")


def test_outcomes_are_of_four_kinds_and_the_lead_counts_them() -> None:
    assert [row.number for row in ROWS if not row.kind] == []
    lead = " ".join(TEXT.partition("\n## ")[0].split())
    counts = Counter(row.kind for row in ROWS)
    for kind, words in KINDS.items():
        assert re.findall(rf"(\d+) {words}", lead) == [str(counts[kind])], words
    assert f"Of the {CLAIMS}," in lead


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"E{row.number}")
def test_a_row_keeps_what_its_outcome_promises(row: Row) -> None:
    codes = re.findall(r"`([^`]+)`", row.command)
    assert len(codes) == (row.kind != NONE), "one command, or none where there is no way"
    assert all(code.startswith(("python train.py ", "ffnlab ", "tests/")) for code in codes)
    if row.kind == TEST:
        assert row.spans("tests/"), "no test is named"
    if row.kind == OPEN:
        assert not row.command.startswith("`tests/"), "a test measures nothing"
    if row.kind == STUDY:  # numbers are the study's own
        link = re.findall(r"\]\(\.\./(experiments/\w+/README\.md)\)", row.outcome)[0]
        study = re.findall(r"\d+\.\d+", (ROOT / link).read_text(encoding="utf-8"))
        said = re.sub(r"\]\([^)]*\)", "", row.outcome)
        assert set(re.findall(r"\d+\.\d+", said)) <= set(study), link


@pytest.mark.parametrize("command", TRAINS)
def test_training_commands_compose(command: str) -> None:
    first, *_ = jobs(command)  # an arm that its study lacks is refused here
    if " experiment=" not in command:  # test_experiments.py composes the arms of all studies
        compose(first)


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINS)
def test_every_job_of_a_command_composes(command: str) -> None:
    for overrides in jobs(command):
        compose(overrides)


@pytest.mark.parametrize("command", once("ffnlab "))
def test_commands_of_ffnlab_parse(command: str) -> None:
    args = parsed(command)
    for name in getattr(args, "names", []):
        assert name in entries(), f"{name} is no figure"
    settings = [word for word in shlex.split(command)[2:] if "=" in word]
    if settings:
        compose(settings)


@pytest.mark.parametrize("node", once("tests/"))
def test_tests_that_are_named_exist(node: str) -> None:
    file, _, name = node.partition("::")
    assert name in functions(ROOT / file)


def test_links_resolve() -> None:
    for page in (PAGE, ROOT / "README.md", ROOT / "experiments" / "README.md"):
        text = page.read_text(encoding="utf-8")
        for link in set(re.findall(r"\]\((?!https?:)([^)#\s]*(?:#[^)\s]*)?)\)", text)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
        assert page == PAGE or "docs/claims.md)" in text, f"{page} does not lead to the claims"
