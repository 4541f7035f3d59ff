"""Which runs are one arm, and which seed each is."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ffnlab.analysis.runs import Run
from ffnlab.errors import UserError, unknown
from ffnlab.record.runs import no_run, runs_in

# Seeds, and what changes where and how a run is recorded, not what comes out of it: no arm is made of these.
NOT_THE_ARM = ("seed", "data.seed", "out", "logger", "study", "arm", "plugins", "checkpoint", "probe")
NOT_THE_ARM += ("train.threads",)
NO_CHOICE = ("logger", "probe", "experiment", "arch_act")  # groups that name no arm
BUNDLE = "arch"  # a choice that makes others


class Seed(NamedTuple):
    """What tells the replicates of an arm apart: `seed`, and `data.seed` where that is another."""

    seed: int
    data: int

    def __str__(self) -> str:
        return str(self.seed) if self.seed == self.data else f"{self.seed}/{self.data}"


@dataclass
class Arm:
    """The runs of one configuration, by seed."""

    name: str
    runs: dict[Seed, Run] = field(default_factory=dict)  # those that are done
    diverged: dict[Seed, Run] = field(default_factory=dict)


def find(paths: Sequence[Path]) -> list[Run]:
    """Run directories, and the runs in study folders in the order in which they were begun.

    Raises UserError for a path that is neither.
    """
    runs: dict[Path, Run] = {}
    problems = []
    for path in paths:
        folders = [path] if (path / "config.yaml").exists() else runs_in(path)
        if not folders:
            problems.append(no_run(path))
        found = [Run(folder) for folder in folders]
        found.sort(key=lambda run: (str(run.info.get("created")), run.name))
        runs |= {run.path.resolve(): run for run in found}
    if problems:
        raise UserError(*problems)
    return list(runs.values())


def group(
    runs: Sequence[Run], by: Sequence[str] = (), *, hint: str = ", or tell them apart with --by KEY"
) -> list[Arm]:
    """The arms of runs that are done or diverged, in the order of their first runs.

    The arm is what `by` says: choices of groups (ffn) and keys (optim.lr); else the config key `arm`, where
    all runs have one; else what differs between the configurations. Raises UserError when two runs are the
    same arm and the same seed, and for a key in `by` that no run has.
    """
    if by:
        names = _by(runs, by)
    elif all(run.config.get("arm") for run in runs):
        names = [str(run.config["arm"]) for run in runs]
    else:
        names = _by_difference(runs)
    arms: dict[str, Arm] = {}
    problems = []
    for name, run in zip(names, runs, strict=True):
        arm, seed = arms.setdefault(name, Arm(name)), seed_of(run)
        twin = arm.runs.get(seed) or arm.diverged.get(seed)
        if twin is not None:
            problems.append(
                f"{twin.path} and {run.path} are both arm '{name}' with seed {seed}: leave one out{hint}; "
                f"they differ in {', '.join(differing([twin, run])) or 'nothing'}"
            )
        (arm.diverged if run.info.get("status") == "diverged" else arm.runs)[seed] = run
    if problems:
        raise UserError(*problems)
    return list(arms.values())


def seed_of(run: Run) -> Seed:
    """The seeds of a run."""
    seed = run.config.get("seed", 0)
    return Seed(seed, (run.config.get("data") or {}).get("seed", seed))


def settings(run: Run) -> dict[str, Any]:
    """The configuration that makes the arm: dotted key -> value."""
    return {
        key: value
        for key, value in leaves(run.config)
        if not any(key == skip or key.startswith(f"{skip}.") for skip in NOT_THE_ARM)
    }


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration with its dotted key."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys whose values are not the same in all runs."""
    of_run = [settings(run) for run in runs]
    keys = dict.fromkeys(key for found in of_run for key in found)
    return [key for key in keys if len({_word(found.get(key, ...)) for found in of_run}) > 1]


def _by(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    found = [dict(leaves(run.config)) | _choices(run) for run in runs]
    known = {key for one in found for key in one}
    if wrong := [unknown("key", key, known) for key in keys if key not in known]:
        raise UserError(*wrong)
    return [" ".join(f"{key}={_word(one.get(key, ...))}" for key in keys) for one in found]


def _by_difference(runs: Sequence[Run]) -> list[str]:
    """Names such as 'ffn=swiglu act=relu2': the choices that differ, and the keys that differ beyond them."""
    choices = [_choices(run) for run in runs]
    values = [settings(run) for run in runs]
    groups = list(dict.fromkeys(name for found in choices for name in found))
    groups = [name for name in groups if len({_word(found.get(name)) for found in choices}) > 1]
    if BUNDLE in groups:
        groups = [BUNDLE, *(name for name in groups if not _follows(name, choices, BUNDLE, choices))]
    keys = [key for key in differing(runs) if not _explained(key, values, groups, choices)]
    named = [
        [(name, found.get(name)) for name in groups] + [(key, own.get(key, ...)) for key in keys]
        for found, own in zip(choices, values, strict=True)
    ]
    return [" ".join(f"{k}={_word(v)}" for k, v in parts if v is not ...) or "all" for parts in named]


def _choices(run: Run) -> dict[str, Any]:
    found = run.info.get("choices") or {}
    return {name: choice for name, choice in found.items() if name not in NO_CHOICE}


def _explained(
    key: str, values: Sequence[dict[str, Any]], groups: Sequence[str], choices: Sequence[dict[str, Any]]
) -> bool:
    """Whether a key differs only because the choice of its group (or the bundle) does."""
    owners = [name for name in groups if name == BUNDLE or key.startswith(f"{name.rpartition('@')[2]}.")]
    return any(_follows(key, values, name, choices) for name in owners)


def _follows(
    key: str, values: Sequence[dict[str, Any]], group: str, choices: Sequence[dict[str, Any]]
) -> bool:
    """Whether there is one value of `key` for each choice of `group`."""
    seen: dict[str, set[str]] = defaultdict(set)
    for own, found in zip(values, choices, strict=True):
        seen[_word(found.get(group))].add(_word(own.get(key, ...)))
    return all(len(words) == 1 for words in seen.values())


def _word(value: Any) -> str:
    """A value as one types it: true, null, 0.02, [a,b]."""
    if value is ...:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
