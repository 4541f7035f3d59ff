"""Token files: little-endian uint16 or uint32, memory-mapped, with their hashes."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from ffnlab.errors import UserError
from ffnlab.foreign import inside, plain_name

SHARD_TOKENS = 1 << 27


class Shard(TypedDict):
    """One file of tokens; size and mtime_ns tell cheaply that it is still the file that was hashed."""

    file: str
    tokens: int
    sha256: str
    size: int
    mtime_ns: int


def dtype_for(vocab_size: int) -> str:
    """uint16 up to 65,536 tokens, else uint32 (a cast of 70000 to uint16 would silently be 4464)."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def hash_file(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Tokens:
    """Several token arrays read as one, without loading them."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = [array for array in arrays if len(array)]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from `start` on, int64 (fewer at the end)."""
        parts = []
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for array, offset in zip(self._arrays[first:], self._starts[first:], strict=False):
            if length <= 0:
                break
            part = array[start - offset : start - offset + length]
            parts.append(part.astype(np.int64))
            start, length = start + len(part), length - len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def part(self, start: int, end: int) -> "Tokens":
        """The tokens [start, end) as views."""
        pairs = zip(self._arrays, self._starts[:-1].tolist(), strict=True)
        return Tokens([array[max(start - at, 0) : max(end - at, 0)] for array, at in pairs])


class ShardWriter:
    """Writes the tokens of one split to `<split>-00000.bin`, `<split>-00001.bin`, ... and counts them."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int = SHARD_TOKENS):
        self._folder, self._split, self._dtype, self._limit = folder, split, np.dtype(dtype), shard_tokens
        self._file = None
        self.shards: list[Shard] = []
        self.documents = self.bytes = self.tokens = 0

    def append(self, tokens: np.ndarray) -> None:
        """Write tokens (any unsigned type; the vocabulary decided the file's)."""
        data = tokens.astype(self._dtype)
        self.tokens += len(data)
        while len(data):
            if self._file is None:
                self._open()
            taken, data = np.split(data, [self._limit - self.shards[-1]["tokens"]])
            self._write(taken)
            if self.shards[-1]["tokens"] == self._limit:
                self.close()

    def _open(self) -> None:
        name = f"{self._split}-{len(self.shards):05d}.bin"
        self._file = (self._folder / name).open("wb")
        self._digest = hashlib.sha256()
        self.shards.append({"file": name, "tokens": 0, "sha256": "", "size": 0, "mtime_ns": 0})

    def _write(self, data: np.ndarray) -> None:
        assert self._file is not None
        raw = data.tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self.shards[-1]["tokens"] += len(data)
        self.shards[-1]["size"] += len(raw)

    def close(self) -> None:
        """Bring the open file to the disk."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.shards[-1]["sha256"] = self._digest.hexdigest()
        self.shards[-1]["mtime_ns"] = (self._folder / self.shards[-1]["file"]).stat().st_mtime_ns


def open_shards(folder: Path, shards: Sequence[Shard], dtype: str) -> Tokens:
    """Map the files of a manifest. Raises UserError when one is missing or was changed.

    Size and time are compared; where they differ (the cache was copied) the sha256 decides, and the entry
    gets the new time, so that a caller who stores the manifest again need not hash twice.
    """
    for shard in shards:
        path = folder / str(shard["file"])
        if not plain_name(shard["file"]):
            raise UserError(
                f"{folder}: the manifest names {shard['file']!r}, no file in it. {_AGAIN} {folder}"
            )
        try:
            inside(path, folder)
            stat = path.stat()
            same = stat.st_size == shard["size"]
            if same and stat.st_mtime_ns != shard["mtime_ns"]:
                same = hash_file(path) == shard["sha256"]
                shard["mtime_ns"] = stat.st_mtime_ns
        except OSError as error:
            raise UserError(
                f"the shard {path} cannot be read: {error.strerror}. {_AGAIN} {folder}"
            ) from error
        if not same:
            raise UserError(
                f"the shard {path} was changed after tokenising (expected {shard['size']} bytes with sha256 "
                f"{shard['sha256'][:12]}...; found {stat.st_size} bytes). {_AGAIN} {folder}"
            )
    return Tokens([np.memmap(folder / shard["file"], dtype=dtype, mode="r") for shard in shards])


_AGAIN = "Delete the folder to have the text tokenised again:"
