"""Tokenizers that are ready to use: text <-> token ids, kept in one json file.

A file holds data only (bytes, characters, the name of a split pattern), so that reading a tokenizer of
somebody else's run cannot run code or smuggle in a regular expression.
"""

import base64
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ffnlab import foreign
from ffnlab.errors import UserError

EOT = "<|endoftext|>"
FORMAT = "ffnlab-tokenizer-1"
MAX_TOKENS = 1 << 21

PATTERNS = {
    # GPT-2's, in the possessive form of tiktoken.
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    # GPT-4's, the default of rustbpe.
    "gpt4": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+""",  # noqa: E501
}


class Tokenizer(ABC):
    """Text <-> ids in [0, vocab_size). `eot` ends every document (None: documents are not marked)."""

    kind: str
    vocab_size: int
    eot: int | None

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Ids of `text` as uint32; the text of the end mark is ordinary text here."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for (the end mark: its text)."""

    @abstractmethod
    def to_dict(self) -> dict:
        """All that defines the tokenizer, as plain json values."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return self.encode_array(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises UserError for an unknown id."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UserError(f"token id {token} lies outside the vocabulary (0 to {self.vocab_size - 1}).")
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", errors="replace")

    @property
    def hash(self) -> str:
        """sha256 of the definition: equal hashes give equal ids."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write one json file, atomically."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"format": FORMAT, **self.to_dict()}), encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"{target} cannot be written: {error.strerror}. Free some space or choose another out=..."
            ) from error


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, 256 in all. Byte 0xFF never occurs in UTF-8, so that it can be the end mark."""

    kind, vocab_size, eot = "byte", 256, 255

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)

    def token_bytes(self, token: int) -> bytes:
        return EOT.encode() if token == self.eot else bytes([token])

    def to_dict(self) -> dict:
        return {"kind": self.kind}


class CharTokenizer(Tokenizer):
    """One id per character of `characters`, in their order; with `end_mark` one more id ends a document."""

    kind = "char"

    def __init__(self, characters: str, end_mark: bool):
        if not characters or len(set(characters)) != len(characters):
            raise UserError("a char tokenizer needs one or more characters, each of them once.")
        self.characters = characters
        self.eot = len(characters) if end_mark else None
        self.vocab_size = len(characters) + end_mark
        points = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")
        self._order = np.argsort(points).astype(np.uint32)
        self._sorted = points[self._order]

    def encode_array(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        slot = np.searchsorted(self._sorted, points).clip(max=len(self._sorted) - 1)
        unknown = np.flatnonzero(self._sorted[slot] != points)
        if len(unknown):
            char = text[unknown[0]]
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}) at position {unknown[0]} is not among the "
                f"{len(self.characters)} characters of the char tokenizer: leave it out, or use "
                "tokenizer=bpe or byte."
            )
        return self._order[slot]

    def token_bytes(self, token: int) -> bytes:
        return (EOT if token == self.eot else self.characters[token]).encode()

    def to_dict(self) -> dict:
        return {"kind": self.kind, "characters": self.characters, "end_mark": self.eot is not None}


class BPETokenizer(Tokenizer):
    """Byte-pair encoding by tiktoken: `ranks[i]` is the bytes of id i, in merge order; end mark last."""

    kind = "bpe"

    def __init__(self, pattern: str, ranks: list[bytes]):
        if pattern not in PATTERNS:
            raise UserError(f"unknown BPE pattern {pattern!r}; expected one of {', '.join(PATTERNS)}.")
        if (
            len(set(ranks)) != len(ranks)
            or not {bytes([b]) for b in range(256)} <= set(ranks)
            or b"" in ranks
        ):
            raise UserError("a BPE vocabulary needs all 256 single bytes, and no token twice or empty.")
        import tiktoken

        self.pattern, self.ranks = pattern, ranks
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._tiktoken = tiktoken.Encoding(
            "ffnlab",
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={EOT: self.eot},
        )

    def encode_array(self, text: str) -> np.ndarray:
        return self._tiktoken.encode_to_numpy(text, disallowed_special=())

    def token_bytes(self, token: int) -> bytes:
        return EOT.encode() if token == self.eot else self.ranks[token]

    def to_dict(self) -> dict:
        ranks = [base64.b64encode(token).decode() for token in self.ranks]
        return {"kind": self.kind, "pattern": self.pattern, "ranks": ranks}


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read what `Tokenizer.save` wrote. Raises UserError when it is missing, torn or not a tokenizer."""
    try:
        return from_dict(foreign.read_json(Path(path)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {path}: {error}.") from error
    except UserError as error:
        raise UserError(f"{path} is not a usable tokenizer file: {error}") from error


def from_dict(data: object) -> Tokenizer:
    """The tokenizer that `to_dict` described; every value is checked. Raises UserError."""
    if not isinstance(data, dict) or data.get("format", FORMAT) != FORMAT:
        raise UserError(f"expected an object with format {FORMAT!r}.")
    match data:
        case {"kind": "byte"}:
            return ByteTokenizer()
        case {"kind": "char", "characters": str(characters), "end_mark": bool(end_mark)}:
            return CharTokenizer(characters, end_mark)
        case {"kind": "bpe", "pattern": str(pattern), "ranks": list(ranks)} if len(ranks) < MAX_TOKENS:
            try:
                return BPETokenizer(pattern, [base64.b64decode(token, validate=True) for token in ranks])
            except (ValueError, TypeError) as error:
                raise UserError(f"a token is not base64: {error}.") from error
    raise UserError(
        f"unknown kind of tokenizer {data.get('kind')!r} or a field is missing; expected byte, char or bpe."
    )
