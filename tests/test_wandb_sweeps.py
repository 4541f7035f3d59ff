"""W&B's sweeps and Optuna's: what they would run is a valid command line of train.py."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ffnlab import build
from ffnlab.validate import validate
from ffnlab.verbs.hpo.plan import read_plan

ROOT = Path(__file__).resolve().parents[1]
METRICS = {"val/loss", "train/loss", "val/bits_per_byte"}


def corners(parameter: dict[str, Any]) -> list[Any]:
    """All values, or both ends of a range."""
    if "value" in parameter:
        return [parameter["value"]]
    return parameter.get("values") or [parameter["min"], parameter["max"]]


def command_lines(sweep: dict[str, Any]) -> Iterator[list[str]]:
    """Each value of each parameter once, the others at their first: as an agent writes them."""
    first = {key: corners(node)[0] for key, node in sweep["parameters"].items()}
    for key, node in sweep["parameters"].items():
        for value in corners(node):
            yield [f"{k}={v}" for k, v in {**first, key: value}.items()]


@pytest.mark.parametrize("path", sorted(ROOT.glob("sweeps/*.yaml")), ids=lambda path: path.stem)
def test_what_an_agent_runs_composes(path: Path):
    sweep = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert sweep["program"] == "train.py"
    assert sweep["command"][-1] == "${args_no_hyphens}"
    assert sweep["metric"]["name"] in METRICS
    for overrides in {tuple(line) for line in command_lines(sweep)}:
        cfg, _ = build.compose(list(overrides))
        validate(cfg)


@pytest.mark.parametrize("path", sorted(ROOT.glob("sweeps/optuna/*.yaml")), ids=lambda path: path.stem)
def test_what_optuna_tries_composes(path: Path):
    plan = read_plan(path)
    space = {
        key: {"values": node.get("choices") or [node["low"], node["high"]]}
        for key, node in plan.space.items()
    }
    for overrides in {tuple(line) for line in command_lines({"parameters": space})}:
        cfg, _ = build.compose([*plan.fixed, *overrides])
        validate(cfg)
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    shown = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)]
    assert yaml.safe_load(path.read_text(encoding="utf-8")) in shown
