"""From yaml and overrides to plain checked values: compose, locate, factory, settings, validate.

No file that is read can run code: a `_target_` is only ever a class of ffnlab or of a package that the
command line names.
"""

import functools
import importlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ffnlab.errors import UserError, closest
from ffnlab.withheld import refuse_secrets

T = typing.TypeVar("T")
LISTS = ("stream", "probe")  # groups that take several choices
# Text in which every ${...} names another key: no resolver (a colon), nothing nested that could become one.
REFERENCES = re.compile(r"(?:[^$]|\$(?!\{)|\$\{[\w.@\[\]-]+\})*", re.DOTALL)

# Parts by group: each must be a mapping with a `_target_`.
GROUPS = (
    "data",
    "tokenizer",
    "optim",
    "schedule",
    "attention",
    "norm",
    "norm_ffn",
    "skip",
    "threshold",
    "act",
    "ffn",
    "logger",
)


def config_dir() -> Path:
    """The folder of train.yaml: ffnlab/configs in an installed wheel, configs/ beside src/ in a checkout."""
    here = Path(__file__).resolve().parent
    return next(p for p in (here / "configs", here.parents[1] / "configs") if (p / "train.yaml").is_file())


def compose(overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The resolved configuration of `python train.py OVERRIDES` as plain values, and the choice made in each
    group.
    """
    import hydra

    with hydra.initialize_config_dir(str(config_dir()), job_name="train", version_base="1.3"):
        cfg = hydra.compose("train", overrides=list(overrides), return_hydra_config=True)
        choices = dict(cfg.hydra.runtime.choices)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    return trusted(plain(cfg), choices, overrides), choices


def trusted(cfg: dict[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration, if the command line names the packages whose code it may run, and each group has
    one choice: Hydra would merge two into one part."""
    if cfg.get("plugins") and not any(line.lstrip("+").startswith("plugins=") for line in overrides):
        raise UserError(f"plugins={cfg['plugins']} comes from a file: name such packages on the command line")
    if several := [group for group, choice in choices.items() if group not in LISTS and lists(choice)]:
        raise UserError(*(f"{group}={choices[group]}: {group} takes one choice" for group in several))
    return cfg


def lists(choice: Any) -> bool:
    """Whether a group's choice is a list of them."""
    return not isinstance(choice, str) and isinstance(choice, Sequence)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Plain dicts, lists and scalars; interpolations of other keys are resolved, resolvers such as
    ${oc.env:X} are refused.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(*(f"{key} is missing: it has no default, give {key}=..." for key in missing))
    for text in texts(OmegaConf.to_container(cfg, resolve=False)):
        if "${" in text and not REFERENCES.fullmatch(text):
            raise UserError(
                f"{text}: only references to other keys are allowed in a configuration, such as ${{seed}}"
            )
    out = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(out, dict)
    refuse_secrets(texts(out))
    return typing.cast(dict[str, Any], out)


def packages(cfg: Mapping[str, Any]) -> Sequence[str]:
    """Where classes of parts may come from: ffnlab and what the command line names."""
    if not fits(cfg["plugins"], list[str]):
        raise UserError(f"plugins={shown(cfg['plugins'])}: expected a list of packages, such as [mine]")
    return ("ffnlab", *cfg["plugins"])


def texts(node: Any) -> typing.Iterator[str]:
    """All strings in plain values, keys too."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from texts(key)
            yield from texts(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from texts(value)
    elif isinstance(node, str):
        yield node


def locate(target: str, packages: Sequence[str] = ("ffnlab",)) -> type:
    """The class that `target` names: it must be defined in the module that the name says, inside one of
    `packages`.
    """
    module_name, _, name = target.rpartition(".")
    if module_name.split(".")[0] not in packages:
        raise UserError(
            f"_target_ {target!r}: expected a class of {' or '.join(packages)}; "
            "name other packages with plugins=[...]"
        )
    try:
        found = vars(importlib.import_module(module_name)).get(name)
    except ModuleNotFoundError as error:
        raise UserError(f"_target_ {target!r}: {error}") from error
    if not isinstance(found, type) or f"{found.__module__}.{found.__qualname__}" != target:
        raise UserError(f"_target_ {target!r}: module {module_name} defines no class {name}")
    return found


def factory(
    node: Any, path: str, given: Sequence[str] = (), packages: Sequence[str] = ("ffnlab",)
) -> functools.partial[Any]:
    """`functools.partial(cls, **options)` of a part; `given` are the arguments that the caller adds when it
    calls it.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        raise UserError(
            f"{path}={node!r}: expected a part of configs/{path.split('.')[0]}/ (a mapping with a _target_)"
        )
    cls = locate(node["_target_"], packages)
    options = {key: value for key, value in node.items() if key != "_target_"}
    hints = typing.get_type_hints(cls.__init__)
    names = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return functools.partial(
        cls, **check({n: hints.get(n, Any) for n in names if n not in given}, options, path)
    )


def settings(cls: type[T], node: Any, path: str) -> T:
    """The dataclass `cls` from a mapping, with names and types checked."""
    if not isinstance(node, Mapping):
        raise UserError(f"{path}={node!r}: expected a mapping")
    return cls(**check(typing.get_type_hints(cls), node, path))


def check(hints: Mapping[str, Any], options: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The options, integers made floats where a float is asked.

    Raises a UserError with all that is unknown, missing or of another type.
    """
    problems = [unknown_key(path, key, hints) for key in options if key not in hints]
    problems += [f"{dotted(path, key)} is missing" for key in hints if key not in options]
    problems += [
        f"{dotted(path, key)}={shown(value)}: expected {describe(hints[key])}"
        for key, value in options.items()
        if key in hints and not fits(value, hints[key])
    ]
    if problems:
        raise UserError(*problems)
    return {key: as_float(value, hints[key]) for key, value in options.items()}


def as_float(value: Any, hint: Any) -> Any:
    """An integer that was given for a float as that float, also inside a list or a mapping."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [arm for arm in args if fits(value, arm)]
        return as_float(value, int if int in arms else arms[0])
    if isinstance(value, Mapping) and args:
        return {key: as_float(item, args[-1]) for key, item in value.items()}
    if isinstance(value, list) and args:
        return [as_float(item, args[0]) for item in value]
    return float(value) if hint is float and isinstance(value, int) else value


def unknown_key(path: str, key: str, known: typing.Iterable[str]) -> str:
    """One line with the nearest name and all names."""
    near = closest(str(key), known)
    hint = f" Did you mean {dotted(path, near)}?" if near else ""
    return f"unknown key {dotted(path, key)}.{hint} Keys: {', '.join(sorted(known))}"


def dotted(path: str, key: str) -> str:
    """`path.key`; the key alone at the top."""
    return f"{path}.{key}" if path else str(key)


def shown(value: Any) -> str:
    """A value in the words of a command line: null, true and false as there."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value fits a type annotation (an int fits float; a bool fits neither int nor float)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args and type(value) in {type(arg) for arg in args}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(v, args[1]) for v in value.values())
    if isinstance(origin, type) and issubclass(origin, Sequence | frozenset):
        return isinstance(value, list | tuple | frozenset) and all(fits(v, args[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def describe(hint: Any) -> str:
    """A type annotation in words."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    words = {
        float: "a finite number",
        int: "an integer",
        bool: "true or false",
        str: "a name",
        type(None): "null",
    }
    if hint in words:
        return words[hint]
    return (
        "a list"
        if isinstance(typing.get_origin(hint), type) and not issubclass(typing.get_origin(hint), Mapping)
        else "a mapping"
    )
