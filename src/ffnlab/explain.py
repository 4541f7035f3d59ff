"""Every problem of a command line at once, for the front ends: Hydra stops at the first, and lets some
through.

Each override is parsed, each choice looked up, each key tried alone; what is good is composed together and
validated.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ffnlab.errors import UserError, closest, nearest, unknown

PLUGINS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}  # launcher -> extra
EXTRAS = {("hydra/launcher", k): f"needs a plugin: pip install -e '.[{v}]'" for k, v in PLUGINS.items()}


def explain(
    overrides: Sequence[str],
    loader: ConfigLoader,
    validate: Callable[[DictConfig], None],
    config_name: str = "train",
) -> list[str]:
    """All problems, one line each; an empty list when the command line composes and passes `validate`.

    `loader` is Hydra's, which knows the search path; `validate(cfg)` raises UserError for what composes but
    makes no sense.
    """
    problems, parsed = _parse(overrides, loader)
    try:
        tree = Tree(loader, [_text(o) for o in parsed if o.key_or_group == "hydra.searchpath"], config_name)
        parsed = [o for o in parsed if o.key_or_group != "hydra.searchpath"]
        choices = [o for o in parsed if tree.is_choice(o)]
        wrong = {_text(o): choice_problems(o, tree) for o in choices}
        base = tree.compose([_text(o) for o in choices if not wrong[_text(o)]])
        wrong |= {_text(o): _key_problems(o, tree, base) for o in parsed if o not in choices}
        problems += [line for o in parsed for line in wrong[_text(o)]]
        cfg = tree.compose([_text(o) for o in parsed if not wrong[_text(o)]])
        with open_dict(cfg):
            del cfg["hydra"]
        validate(cfg)
    except UserError as error:
        problems += error.problems
    except (HydraException, OSError, ValueError) as error:  # right one by one, not together
        problems.append(brief(error))
    return list(dict.fromkeys(problems))


def config_loader(folder: Path, extra: str | None = None) -> ConfigLoader:
    """Hydra's loader for a folder of configs, and for an `extra` one as after --config-dir."""
    setup_globals()
    path = create_config_search_path(str(folder))
    if extra is not None:
        path.prepend("command-line", f"file://{os.path.abspath(extra)}", SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(path)


class Tree:
    """The config folders as one command line sees them, a user's own (`hydra.searchpath=`) among them."""

    def __init__(self, loader: ConfigLoader, searchpath: Sequence[str] = (), config_name: str = "train"):
        self.loader, self.searchpath, self.config_name = loader, list(searchpath), config_name
        self.cache: dict[tuple[str, ...], DictConfig] = {}
        self.known = set(self.compose([]).hydra.runtime.choices)  # where one chooses, `norm@norm_ffn` too

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The config with its `hydra` node, unresolved."""
        line = (*self.searchpath, *overrides)
        if line not in self.cache:
            self.cache[line] = self.loader.load_configuration(self.config_name, list(line), RunMode.RUN)
        return deepcopy(self.cache[line])

    def options(self, group: str) -> list[str]:
        """The choices of a group; empty when there is no such group."""
        return self.loader.get_group_options(group, config_name=self.config_name, overrides=self.searchpath)

    def groups(self) -> list[str]:
        """All groups, such as `ffn` and `hydra/launcher`."""
        top = [g for g in self.loader.list_groups("") if g != "hydra"]
        return [*top, *(f"hydra/{g}" for g in self.loader.list_groups("hydra"))]

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses an option of a group, as opposed to setting a key."""
        group, name = override.key_or_group, override.get_key_element().lstrip("+~")
        if not group or isinstance(override.value(), dict):
            return False
        return name in self.known or bool(self.options(group))

    def file(self, group: str, option: str) -> DictConfig:
        """What one choice's yaml says; empty where it cannot be read alone."""
        repository = self.loader.repository if isinstance(self.loader, ConfigLoaderImpl) else None
        loaded = repository.load_config(f"{group}/{option}") if repository else None
        return loaded.config if loaded and isinstance(loaded.config, DictConfig) else OmegaConf.create({})


def choice_problems(override: Override, tree: Tree) -> list[str]:
    """What is wrong with `GROUP=CHOICE`, whatever else the command line says."""
    text, group, value = _text(override), override.key_or_group, override.value()
    name, known, options = override.get_key_element().lstrip("+~"), tree.known, tree.options(group)
    if override.is_delete():
        return [] if name in known else [f"{text}: '{name}' is not chosen here.{nearest(name, known)}"]
    if (override.is_add() or override.is_force_add()) and name in known:
        return [f"{text}: {name} has a choice already; write {text.lstrip('+')}"]
    if override.package is not None and name not in known:
        return [f"{text}: '{name}' is not a choice to be made here.{nearest(name, known)}"]
    if value is None or value == "":
        hint = f" {name}=none is the absence of it." if "none" in options else ""
        return [f"{text}: {group} needs a choice.{hint} Options: {', '.join(options)}."]
    names = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    absent = [n for n in names if n.removesuffix(".yaml") not in options]
    wrong = [f"{text}: {EXTRAS.get((group, n)) or unknown(group, n, options)}" for n in absent]
    if (
        not wrong and len(names) > 1 and any("_target_" in tree.file(group, n) for n in names)
    ):  # parts do not merge
        wrong = [f"{text}: {group} takes one choice. To run each of them: -m {name}={','.join(names)}"]
    return wrong


def _key_problems(override: Override, tree: Tree, base: DictConfig) -> list[str]:
    text, key, value = _text(override), override.key_or_group, override.value()
    if not key:
        return [f"{text}: expected KEY=VALUE"]
    if override.package is not None:
        return [f"{text}: there is no group '{key}'.{nearest(key, tree.groups())}"]
    if not _exists(base, key):
        return [f"{text}: {_unknown_key(key, tree, base)}"]
    if override.is_add():
        return [f"{text}: {key} exists; write {text.lstrip('+')}"]
    if override.is_delete():
        return []
    if isinstance(OmegaConf.select(base, key), DictConfig) and not isinstance(value, dict):
        choice = next((c for c in sorted(tree.known) if c.endswith(f"@{key}")), None)
        better = f"choose {choice}={value}" if choice else f"set one of its keys, {key}.NAME=VALUE"
        return [f"{text}: {key} is a group of settings; {better}"]
    try:
        OmegaConf.update(deepcopy(base), key, value, merge=True)
    except Exception as error:  # OmegaConf raises many kinds for one wrong value
        return [f"{text}: {brief(error)}"]
    return []


def _unknown_key(key: str, tree: Tree, base: DictConfig) -> str:
    """Why a key is not there: an option of another choice than the one in force, or mistyped."""
    head, _, rest = key.partition(".")
    owners = [option for option in tree.options(head) if rest and _exists(tree.file(head, option), rest)]
    if owners:
        where = ", ".join(f"{head}={option}" for option in owners)
        return f"{head}={base.hydra.runtime.choices.get(head)} has no '{rest}'; it belongs to {where}"
    own = key.startswith("hydra.")
    names = [p for p in _paths(OmegaConf.to_container(base)) if p.startswith("hydra.") == own]
    stem, _, last = key.rpartition(".")
    shallowest_last = sorted(names, key=lambda p: -p.count("."))
    by_last = {p.rpartition(".")[2]: p for p in shallowest_last}
    siblings = {p.rpartition(".")[2]: p for p in names if p.rpartition(".")[0] == stem}
    if not stem:
        siblings |= {group: group for group in tree.groups()}
    near = closest(last, siblings)
    if near:  # a slip in the last word
        close = siblings[near]
    elif last in by_last:  # the right word in the wrong place
        close = by_last[last]
    elif stem in names:
        return f"unknown key '{key}'; keys of {stem}: {', '.join(siblings) or '(none)'}"
    else:
        close = closest(key, names) or by_last.get(closest(last, by_last) or "")
    return f"unknown key '{key}'. " + (f"Did you mean '{close}'?" if close else "--cfg job shows all keys.")


def _parse(overrides: Sequence[str], loader: ConfigLoader) -> tuple[list[str], list[Override]]:
    problems, parsed = [], []
    parser = OverridesParser.create(loader)
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError):
            problems.append(f"{text}: {_syntax(text, loader)}")
            continue
        if override.is_sweep_override():
            key, value = text.split("=", 1)
            problems.append(
                f"{text}: several values; add -m to run each, or write '{key}=[{value}]' for one list"
            )
        else:
            parsed.append(override)
    return problems, parsed


def _syntax(text: str, loader: ConfigLoader) -> str:
    """Why the grammar refuses an override, for somebody who has not read the grammar."""
    for quote in "'\"":
        if text.count(quote) % 2:
            return f"the quote {quote} is not closed"
    for left, right in ("[]", "{}", "()"):
        if text.count(left) != text.count(right):
            return f"{left} and {right} do not match"
    key, equals, value = text.partition("=")
    if not equals:
        groups = [group for group in loader.list_groups("") if text in loader.get_group_options(group)]
        return "expected KEY=VALUE." + (f" Did you mean '{groups[0]}={text}'?" if groups else "")
    if "[" in key:
        return f"a list is set as a whole: {key.partition('[')[0]}=[...]"
    if key != key.strip():
        return "expected KEY=VALUE, with no space before '='"
    return f"the value cannot be read; quote it for Hydra and for the shell: '{key}=\"{value}\"'"


def brief(error: BaseException) -> str:
    """An exception of Hydra or OmegaConf as one line: its message and its cause's, without positions in the
    source.
    """
    texts = [str(e) for e in (error, error.__cause__) if e is not None]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    noise = ("full_key:", "object_type=", "See https:", "Search path", "To append to your config")
    return " ".join(line for line in lines if line and not line.startswith(noise)) or type(error).__name__


def _text(override: Override) -> str:
    return str(override.input_line)


def _exists(cfg: DictConfig, key: str) -> bool:
    """Whether a dotted key is in the config, whatever its value (null included)."""
    head, _, last = key.partition("[")[0].rpartition(".")  # of an element of a list, the list must exist
    try:
        parent = OmegaConf.select(cfg, head, throw_on_missing=False) if head else cfg
    except Exception:  # an interpolation that leads nowhere
        return False
    return isinstance(parent, DictConfig) and (last in parent or last in parent.keys())  # noqa: SIM118 (`in`: not ???)


def _paths(node: Any, prefix: str = "") -> Iterable[str]:
    """All dotted keys of a plain config, parents before children."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")
