"""From a command line to jobs: arms x grid, each job a list of overrides. Nothing is composed here."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ffnlab.errors import UserError, unknown

NOT_THE_RESULT = (
    "hydra",
    "out",
    "logger",
    "study",
    "arm",
)  # where a run is recorded, not what comes out of it


@dataclass
class Job:
    """One run of a sweep."""

    overrides: list[str]  # in Hydra's grammar
    label: str  # the arm, or the swept values without the seed
    out: Path = Path()
    problems: list[str] = field(default_factory=list)  # why it cannot run


def expand(
    command: Sequence[str],
    params: Mapping[str, Any],
    arms: Mapping[str, Sequence[str]],
    loader: ConfigLoader | None = None,
) -> list[Job]:
    """All combinations: for every point of the grid, every arm.

    `params` and `command` span the grid; of one key the command line's values win over the arm's, which win
    over those of `params`. `arm=a,b` on the command line keeps those arms only. An arm's override may have
    several values too: `seed=range(0,8)`. Arms vary fastest, then the later keys.
    """
    fixed = _parse([f"{key}={'null' if value is None else value}" for key, value in params.items()], loader)
    given = _parse(command, loader)
    if "out" in given:
        raise UserError("out= names one run; a sweep names its own, under outputs/<study>/: use study=NAME")
    chosen = _arms(arms, given.pop("arm", None))
    grid = {**{key: o for key, o in fixed.items() if key not in given}, **given}
    jobs: dict[tuple[str, ...], Job] = {}
    for values in _points(grid):
        for name, overrides in chosen.items():
            for arm in _points({k: o for k, o in _parse(overrides, loader).items() if k not in given}):
                merged = tuple({**{k: v for k, v in values.items() if k not in arm}, **arm}.values())
                swept = {
                    k: v for k, v in values.items() if grid[k].is_sweep_override() and k not in {*arm, "seed"}
                }
                label = "-".join([*([slug(name)] if name else []), *(word(k, v) for k, v in swept.items())])
                jobs.setdefault((name, *merged), Job(list(merged), slug(label) if label else ""))
    return list(jobs.values())


def digest(config: Mapping[str, Any]) -> str:
    """8 hex digits of the resolved config without NOT_THE_RESULT: the key of a sweep's ledger."""
    kept = {key: value for key, value in config.items() if key not in NOT_THE_RESULT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]


def slug(text: str, length: int = 48) -> str:
    """A name that is safe as one part of a path and as a value in Hydra's grammar."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:length].rstrip("-.") or "run"


def _parse(texts: Sequence[str], loader: ConfigLoader | None) -> dict[str, Override]:
    """By key; the last of the same key wins."""
    parser = OverridesParser.create(loader)
    parsed, problems = {}, []
    for text in texts:
        try:
            (override,) = parser.parse_overrides(
                [text]
            )  # not parse_override: that one knows no configs for glob()
        except (HydraException, ValueError):
            problems.append(f"{text}: cannot be read; expected KEY=VALUE or KEY=VALUE1,VALUE2")
            continue
        parsed[override.get_key_element().lstrip("+~")] = override
        if override.is_sweep_override() and not override.is_discrete_sweep():
            problems.append(f"{text}: an interval has no list of values; use range(start,stop,step) or a,b,c")
    if problems:
        raise UserError(*problems)
    return parsed


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not values:
        raise UserError(f"{override.input_line}: no value fits")
    return values


def _points(grid: Mapping[str, Override]) -> Iterator[dict[str, str]]:
    """Key -> override, for every combination of the values."""
    for point in itertools.product(*(_values(override) for override in grid.values())):
        yield dict(zip(grid, point, strict=True))


def _arms(arms: Mapping[str, Sequence[str]], wanted: Override | None) -> dict[str, Sequence[str]]:
    if wanted is None:
        return dict(arms) or {"": []}
    names = [text.split("=", 1)[1].strip("'\"") for text in _values(wanted)]
    if not arms:  # a label for all runs
        return {name: [] for name in names[:1]}
    if wrong := [unknown("arm", name, arms) for name in names if name not in arms]:
        raise UserError(*wrong)
    return {name: arms[name] for name in names}


def word(key: str, override: str) -> str:
    """A swept value in a label: the choice of a group by itself, a number with the last word of its key."""
    value = override.split("=", 1)[1]
    number = re.fullmatch(r"[-+.\deE]+|true|false|null", value, re.IGNORECASE)
    return slug(f"{re.split(r'[./@]', key)[-1]}{value}" if number else value)
