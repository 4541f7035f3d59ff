"""Any data set of the Hugging Face hub, or local files through the same library."""

import os
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from ffnlab.data.sources.base import TextSource
from ffnlab.data.split import Document, Split
from ffnlab.errors import UserError

FILE_KINDS = ("text", "json", "csv", "parquet", "arrow")


class HuggingFace(TextSource):
    """`datasets.load_dataset(path, config, ...)`; each row's `column` is a document.

    - path: a name on the hub, a local folder, or a kind of file (text, json, ...) with data_files.
    - split, val_split, test_split: names of its splits; null: held out of `split` by the fractions.
    - join: the text put between rows to make each split one document, or null.
    - sample_by: what a row of a text file is (line, paragraph, document), or null.
    - max_mb: stop after so much text of a split (null: all); meant for streaming.

    The cache goes by these options and by local files; delete it to fetch again what was changed on the hub.
    """

    name = "hf"

    def __init__(
        self,
        *,
        path: str,
        config: str | None,
        split: str,
        val_split: str | None,
        test_split: str | None,
        column: str,
        join: str | None,
        sample_by: str | None,
        data_files: str | list[str] | dict[str, Any] | None,
        revision: str | None,
        streaming: bool,
        max_mb: float | None,
    ):
        if not isinstance(path, str) or not path.strip():
            raise UserError("data=hf needs the name of a data set: data.path=roneneldan/TinyStories")
        if "/" not in path and path not in FILE_KINDS and data_files is not None:
            raise UserError(f"data.path={path} with data_files: expected one of {', '.join(FILE_KINDS)}.")
        if path in FILE_KINDS and data_files is None:
            raise UserError(
                f"data.path={path} is a kind of file: name the files with data.data_files=my/*.{path}"
            )
        if max_mb is not None and not max_mb > 0:
            raise UserError(
                f"data.max_mb={max_mb}: expected a positive number of megabytes, or null for all."
            )
        self._load: dict[str, Any] = {
            "path": path,
            "name": config,
            "data_files": data_files,
            "revision": revision,
            "streaming": streaming,
        } | ({"sample_by": sample_by} if sample_by else {})
        self._splits: dict[Split, str] = {"train": split}
        self._splits |= {"val": val_split} if val_split else {}
        self._splits |= {"test": test_split} if test_split else {}
        self.own_splits = frozenset(self._splits) - {"train"}
        self._column, self._join, self._max_bytes = column, join, max_mb and max_mb * 1e6

    def describe(self) -> dict:
        return {
            "name": self.name,
            "load": self._load,
            "splits": dict(self._splits),
            "column": self._column,
            "join": self._join,
            "max_bytes": self._max_bytes,
            "files": _local_files(self._load["data_files"], self._load["path"]),
        }

    def documents(self) -> Iterator[Document]:
        for kind, split in self._splits.items():
            # where the source holds nothing out itself, the rows of `split` are shared out by the fractions
            label = None if kind == "train" else kind
            rows = self._rows(split)
            for text in rows if self._join is None else [self._join.join(rows)]:
                if text.strip():
                    yield Document(text, label)

    def _rows(self, split: str) -> Iterator[str]:
        seen = 0
        for row in self._guarded(split):
            text = row.get(self._column)
            if not isinstance(text, str):
                raise UserError(
                    f"data.column={self._column}: a row of {self._load['path']} has {type(text).__name__} "
                    "there, expected "
                    f"text. Its columns: {', '.join(row)}."
                )
            # lone surrogates, which no UTF-8 can hold, come only from broken json
            yield text.encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
            seen += len(text.encode("utf-8", "replace"))
            if self._max_bytes and seen >= self._max_bytes:
                return

    def _guarded(self, split: str) -> Iterator[dict[str, Any]]:
        """Rows; whatever the library raises becomes one message with its first cause."""
        try:
            import datasets

            yield from datasets.load_dataset(split=split, **self._load)
        except ImportError as error:
            raise UserError("data=hf needs the package datasets: pip install datasets") from error
        except Exception as error:  # its errors have no common class
            cause = error.__cause__ or error
            offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
            reason = str(cause).strip().splitlines() or [""]
            raise UserError(
                f"cannot load split {split!r} of data.path={self._load['path']}: {type(cause).__name__}: "
                f"{reason[0][:300]}."
                f"{offline} Check the name, the split and the network, or use the embedded corpus with "
                "data=sotu."
            ) from error

    def where(self) -> str:
        return f"data.path={self._load['path']}"


def _local_files(data_files: Any, path: str) -> list[list[Any]]:
    """Path, size and time of all local files, so that a changed file is tokenised again."""
    values = list(data_files.values()) if isinstance(data_files, dict) else [data_files or []]
    names = [name for value in values for name in ([value] if isinstance(value, str) else value)]
    found = [Path(match) for name in names if "://" not in name for match in glob(name, recursive=True)]
    found += [file for file in Path(path).rglob("*") if file.is_file()] if Path(path).is_dir() else []
    stats = [(str(file.absolute()), file.stat()) for file in sorted(set(found))]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
