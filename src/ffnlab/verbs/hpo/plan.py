"""What a search is: the file SPACE.yaml, checked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ffnlab.errors import UserError, unknown

KEYS = {"study", "trials", "metric", "seed", "fixed", "space", "prune_after"}


@dataclass(frozen=True)
class Plan:
    """SPACE.yaml, checked."""

    study: str
    trials: int
    metric: str
    seed: int
    fixed: list[str]
    space: dict[str, dict[str, Any]]
    prune_after: int | None


def read_plan(path: Path) -> Plan:
    """The plan in a file. UserError with all that is wrong with it."""
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not there: `ffnlab hpo --help` shows what such a file holds") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read: {why}") from None
    if not isinstance(node, dict):
        raise UserError(f"{path} does not hold a search: see `ffnlab hpo --help`")
    problems = [unknown("key", str(key), KEYS) for key in node if key not in KEYS]
    space = node.get("space")
    if not isinstance(space, dict) or not space:
        problems.append(f"space is {space!r}; expected keys with a range or choices")
        space = {}
    problems += [f"space.{key}: {wrong}" for key, sub in space.items() if (wrong := wrong_range(sub))]
    name, trials = node.get("study", path.stem), node.get("trials", 20)
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        problems.append(f"study is {name!r}; expected a name that can be a folder's")
    if not isinstance(trials, int) or trials < 1:
        problems.append(f"trials is {trials!r}; expected a whole number of at least 1")
    fixed = node.get("fixed", [])
    if not isinstance(fixed, list) or not all(isinstance(o, str) and "=" in o for o in fixed):
        problems.append(f"fixed is {fixed!r}; expected a list of overrides KEY=VALUE")
    if problems:
        raise UserError(*(f"{path}: {problem}" for problem in problems))
    own = {"metric": node.get("metric", "val/loss"), "seed": node.get("seed", 0)}
    return Plan(
        study=name, trials=trials, fixed=fixed, space=space, prune_after=node.get("prune_after", 5), **own
    )


def wrong_range(node: Any) -> str:
    """What is wrong with one entry of the space; "" when nothing is."""
    if not isinstance(node, dict):
        return f"{node!r}; expected low and high (log, step), or choices"
    if "choices" in node:
        fine = isinstance(node["choices"], list) and node["choices"] and set(node) == {"choices"}
        return "" if fine else f"{node!r}; expected choices: [A, B, ...] and nothing else"
    low, high = (number(node.get(end)) for end in ("low", "high"))
    if set(node) - {"low", "high", "log", "step"}:
        return f"{node!r}; expected the keys low, high, log, step"
    if low is None or high is None or not low < high:
        return f"low {node.get('low')!r}, high {node.get('high')!r}; expected two numbers, the first smaller"
    return "low must be above 0 with log" if node.get("log") and low <= 0 else ""


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
