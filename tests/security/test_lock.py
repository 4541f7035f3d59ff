"""requirements.lock: every line is one version with its hashes; all that pyproject.toml needs is there."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

APART = {"torch"}  # its file differs from machine to machine; pyproject.toml pins its version


def entries(root: Path) -> list[str]:
    """The entries of the lock, each with its continuation lines, without comments."""
    text = (root / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(" #")[0].strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in lines if line]


def test_every_line_is_pinned_by_hash(root: Path):
    found = entries(root)
    assert len(found) > 50
    for line in found:
        assert re.fullmatch(
            r"[\w.-]+(\[[\w,-]+\])?==[\w.!+]+( *;[^#]+?)?( +--hash=sha256:[0-9a-f]{64})+", line
        ), line


def test_all_dependencies_are_in_the_lock(root: Path):
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(line) for group in groups for line in group]
    locked = {}
    for line in entries(root):
        name, version = re.split(r"==", line.split(" ")[0], maxsplit=1)
        locked[canonicalize_name(name.split("[")[0])] = version
    for need in wanted:
        name = canonicalize_name(need.name)
        if name in APART:
            assert re.fullmatch(r"==[\d.]+", str(need.specifier)), need
        else:
            assert name in locked, f"{name} is not in requirements.lock"
            assert need.specifier.contains(locked[name]), (str(need), locked[name])
