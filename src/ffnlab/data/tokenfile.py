"""One file of token ids on somebody's disk: read its form, map it, check every token once.

nanoGPT: bare little-endian uint16. llm.c and modded-nanogpt: 256 int32 of header (magic 20240520, version 1,
number of tokens), then uint16.
"""

from pathlib import Path

import numpy as np

from ffnlab.data.cache import key, read_json, write_json
from ffnlab.data.shards import hash_file
from ffnlab.errors import UserError

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
CHUNK = 1 << 24


def has_header(path: Path) -> bool:
    """Whether a file begins with the magic number of llm.c."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC.to_bytes(4, "little")


def map_file(path: Path, header: bool) -> np.ndarray:
    """The tokens of a file as a memory map. Raises UserError when it is empty, truncated or its header
    lies.
    """
    size = path.stat().st_size
    if not header:
        if size == 0 or size % 2:
            raise UserError(
                f"{path} has {size:,} bytes; expected uint16 tokens, so a positive even number. It is "
                f"{'truncated' if size else 'empty'}: copy or make it again."
            )
        return np.memmap(path, dtype="<u2", mode="r")
    if size < HEADER_BYTES:
        raise UserError(
            f"{path} is truncated: {size} bytes, and its header alone has {HEADER_BYTES}. Copy or make it "
            "again."
        )
    _, version, count = (int(number) for number in np.fromfile(path, dtype="<i4", count=3))
    held = (size - HEADER_BYTES) / 2
    if version != VERSION:
        raise UserError(f"{path}: header version {version}; expected {VERSION} (uint16 tokens of GPT-2).")
    if count != held or count == 0:
        raise UserError(
            f"{path}: the header says {count:,} tokens, the file holds {held:,.10g}. "
            f"{'It is truncated' if held < count else 'The header lies'}: copy or make it again."
        )
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)


def checked(path: Path, array: np.ndarray, cache: Path, vocab_size: int) -> dict:
    """Identity of a file, its highest token compared with the vocabulary; both out of the cache if it is
    unchanged.
    """
    stat = path.stat()
    identity = {"file": str(path.absolute()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
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
