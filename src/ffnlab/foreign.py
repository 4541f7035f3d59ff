"""Files that a stranger may have written, read as data: nothing in them runs or leads out of their folder.

JSON and YAML come out as dicts, lists, texts and numbers. Every function raises a UserError for a file that
is too large or too deeply nested, for a link out of its folder, and for what is no regular file (a pipe,
which would never end); an OSError where the file cannot be opened, FileNotFoundError among them.
"""

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from ffnlab.errors import UserError

MIB = 2**20
MOST_BYTES = 256 * MIB  # of a text file; metrics.jsonl of a long run is the largest
MOST_DEEP = 64  # of dicts and lists within each other; a configuration has 6
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")  # a dotted name


def inside(path: Path, folder: Path) -> Path:
    """`path`, if it lies in `folder` after all links are followed; the folder itself may be a link."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{path} leads out of {folder}: expected a file in it, so copy it there")
    return path


def plain_name(name: Any) -> bool:
    """Whether `name` is that of a file in a folder: no path, neither absolute nor upwards, nothing hidden."""
    return isinstance(name, str) and re.fullmatch(r"[\w\- =+,@]([\w.\- =+,@])*", name) is not None


def read_bytes(path: Path, folder: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes that lies in `folder` (default: its own)."""
    inside(path, folder or path.parent)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is no regular file")
    if status.st_size > most:
        raise UserError(f"{path} has {status.st_size:,} bytes; at most {most:,} are read")
    return path.read_bytes()


def read_text(path: Path, folder: Path | None = None, most: int = MOST_BYTES) -> str:
    """The same as UTF-8; UnicodeDecodeError where it is none."""
    return read_bytes(path, folder, most).decode("utf-8")


def read_json(path: Path, folder: Path | None = None, most: int = MOST_BYTES) -> Any:
    """The value in a JSON file; ValueError where it is none."""
    return parse_json(read_text(path, folder, most))


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text says; ValueError where it is none."""
    try:
        return shallow(json.loads(text))
    except RecursionError:
        raise UserError(f"nested more than {MOST_DEEP} deep") from None


def shallow(value: Any) -> Any:
    """`value`, if dicts and lists are nested at most MOST_DEEP deep in it."""
    level = [value]
    for _ in range(MOST_DEEP + 1):
        level = [child for node in level if isinstance(node, dict | list) for child in children(node)]
        if not level:
            return value
    raise UserError(f"nested more than {MOST_DEEP} deep")


def children(node: Mapping[str, Any] | list[Any]) -> Iterator[Any]:
    """What a dict or a list holds."""
    yield from node.values() if isinstance(node, Mapping) else node


class PlainLoader(yaml.SafeLoader):
    """YAML without tags, anchors and aliases: a text of a kilobyte with aliases can stand for a terabyte."""

    deep = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise ComposerError(None, None, "anchors and aliases are not read", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, f"the tag {event.tag} is not read", event.start_mark)
        self.deep += 1
        if self.deep > MOST_DEEP:
            raise ComposerError(None, None, f"more than {MOST_DEEP} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self.deep -= 1
        return node


def read_yaml(path: Path, folder: Path | None = None, most: int = 4 * MIB) -> Any:
    """The value in a YAML file without tags and aliases; yaml.YAMLError where it is none."""
    return parse_yaml(read_text(path, folder, most))


def parse_yaml(text: str) -> Any:
    """The value that a YAML text without tags and aliases says; yaml.YAMLError where it is none."""
    loader = PlainLoader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise UserError(f"nested more than {MOST_DEEP} deep") from None
    except ValueError as error:  # a date such as 2026-13-45
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def targets(node: Any) -> Iterator[str]:
    """Every `_target_` in plain values, as text."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if key == "_target_":
            yield str(value)
    for child in children(node) if isinstance(node, Mapping | list) else ():
        yield from targets(child)


def wrong_types(value: Mapping[str, Any], shapes: Mapping[str, tuple[type, ...]]) -> list[str]:
    """'key is a list, expected a mapping' for the keys of `shapes` that `value` has; null always fits, and
    keys that are not in `shapes` (of a newer version) are not looked at.
    """
    words = {dict: "a mapping", list: "a list", str: "a text", int: "a number", float: "a number"}
    return [
        f"{key} is {words.get(type(value[key]), type(value[key]).__name__)}, expected "
        f"{' or '.join(dict.fromkeys(words[kind] for kind in kinds))}"
        for key, kinds in shapes.items()
        if value.get(key) is not None and (not isinstance(value[key], kinds) or isinstance(value[key], bool))
    ]
