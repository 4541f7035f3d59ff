"""One file of token ids on somebody's disk: read its form, map it, check every token once.

nanoGPT: bare little-endian ids, uint16 or, for large vocabularies, uint32. llm.c and modded-nanogpt: 256
int32 of header (magic, version, number of tokens), then the ids; the magic number says their type.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ffnlab.data.cache import key, read_json, write_json
from ffnlab.data.shards import hash_file
from ffnlab.errors import UserError

HEADER_BYTES = 1024
CHUNK = 1 << 24


class Header(NamedTuple):
    """A form of llm.c: its version, the type of the ids, and how many there are."""

    version: int
    dtype: str
    vocab_size: int


HEADERS = {20240520: Header(1, "<u2", 50257), 20240801: Header(7, "<u4", 128256)}  # GPT-2, Llama 3


def header_of(path: Path) -> Header | None:
    """What a file of llm.c says at its beginning; None for one without a header."""
    with path.open("rb") as file:
        return HEADERS.get(int.from_bytes(file.read(4), "little"))


def map_file(path: Path, header: Header | None, dtype: str) -> np.ndarray:
    """The tokens of a file as a memory map; `dtype` is that of a file without a header.

    Raises UserError when it is empty, truncated or its header lies.
    """
    size = path.stat().st_size
    if header is None:
        bits, each = ("16", 2) if dtype == "<u2" else ("32", 4)
        if size == 0 or size % each:
            raise UserError(
                f"{path} has {size:,} bytes; expected uint{bits} tokens, so a positive multiple of {each}. "
                f"It is {'truncated' if size else 'empty'}: copy or make it again, or say another data.dtype."
            )
        return np.memmap(path, dtype=dtype, mode="r")
    if size < HEADER_BYTES:
        raise UserError(
            f"{path} is truncated: {size} bytes, and its header alone has {HEADER_BYTES}. Copy or make it "
            "again."
        )
    _, version, count = (int(number) for number in np.fromfile(path, dtype="<i4", count=3))
    held = (size - HEADER_BYTES) / np.dtype(header.dtype).itemsize
    if version != header.version:
        raise UserError(f"{path}: header version {version}; expected {header.version}.")
    if count != held or count == 0:
        raise UserError(
            f"{path}: the header says {count:,} tokens, the file holds {held:,.10g}. "
            f"{'It is truncated' if held < count else 'The header lies'}: copy or make it again."
        )
    return np.memmap(path, dtype=header.dtype, mode="r", offset=HEADER_BYTES)


def checked(path: Path, array: np.ndarray, cache: Path, vocab_size: int) -> dict:
    """Identity of a file, its highest token compared with the vocabulary; both out of the cache if it is
    unchanged.
    """
    stat = path.stat()
    identity = {"file": str(path.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    identity["dtype"] = array.dtype.str
    note = cache / "bin" / f"{key(identity)}.json"
    known = read_json(note)
    if (
        known is None
        or {name: known.get(name) for name in identity} != identity
        or not isinstance(known.get("max"), int)
    ):
        highest = max(int(array[at : at + CHUNK].max()) for at in range(0, len(array), CHUNK))
        known = identity | {"tokens": len(array), "max": highest, "sha256": hash_file(path)}
        _remember(note, known)
    if known["max"] >= vocab_size:
        position = next(
            at + int(np.flatnonzero(array[at : at + CHUNK] >= vocab_size)[0])
            for at in range(0, len(array), CHUNK)
            if (array[at : at + CHUNK] >= vocab_size).any()
        )
        raise UserError(
            f"{path}: token id {int(array[position])} at position {position:,}, but the vocabulary has "
            f"{vocab_size:,} tokens "
            f"(ids 0 to {vocab_size - 1}). Set data.vocab_size to at least {known['max'] + 1}, or choose "
            "the right files."
        )
    return known


def _remember(note: Path, known: dict) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, known)
    except OSError:
        return  # no cache: the file is checked again at the next start
