"""Which text is for training, validation and test, and how long texts are cut for tokenising."""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Literal, NamedTuple

from ffnlab.errors import UserError

Split = Literal["train", "val", "test"]
PIECE = 1 << 18  # characters: small enough for parallel work and for the regular expressions of BPE
_WORDS = re.compile(r"[A-Za-z] (?=[A-Za-z])")


class Document(NamedTuple):
    """One text; `split` is given where the source itself says what it is for."""

    text: str
    split: Split | None = None


def check_fractions(val_frac: float, test_frac: float) -> None:
    """0 < val_frac, 0 <= test_frac, and something is left for training. Raises UserError."""
    if not (0 < val_frac < 1 and 0 <= test_frac < 1 and val_frac + test_frac < 1):
        raise UserError(
            f"data.val_frac={val_frac} data.test_frac={test_frac}: expected 0 < val_frac, 0 <= test_frac "
            "and a sum "
            "below 1; the defaults are 0.1 and 0."
        )


def _hit(index: int, fraction: float) -> bool:
    """True for a share of `fraction` of all indices, evenly spread (every tenth for 0.1)."""
    return math.floor((index + 1) * fraction + 1e-9) > math.floor(index * fraction + 1e-9)


def split_documents(
    documents: Iterable[Document], val_frac: float, test_frac: float
) -> Iterator[tuple[Split, str]]:
    """Give every document its split; a document that brings one keeps it.

    Documents are taken at even distances (every tenth for 0.1), so that a corpus in order of time is held out
    over its whole span, and the rule needs no count and no random numbers. The validation set does not depend
    on test_frac. With too few documents to take a whole one, the end of each is held out: [train | test |
    val]. A fraction of 0 takes nothing.
    """
    iterator = iter(documents)
    needed = math.ceil(1 / min((f for f in (val_frac, test_frac) if f > 0), default=1) - 1e-9)
    head = list(islice(iterator, needed))
    if len(head) < needed:
        for document in head:
            yield from _tail(document, val_frac, test_frac)
        return
    index = rest = 0
    for document in chain(head, iterator):
        if document.split:
            yield document.split, document.text
            continue
        split: Split = "val"
        if not _hit(index, val_frac):
            split = "test" if _hit(rest, test_frac / (1 - val_frac)) else "train"
            rest += 1
        yield split, document.text
        index += 1


def _tail(document: Document, val_frac: float, test_frac: float) -> Iterator[tuple[Split, str]]:
    text = document.text
    if document.split:
        yield document.split, text
        return
    val = int(len(text) * (1 - val_frac) + 1e-6)
    test = int(len(text) * (1 - val_frac - test_frac) + 1e-6)
    parts: list[tuple[Split, str]] = [("train", text[:test]), ("test", text[test:val]), ("val", text[val:])]
    yield from (part for part in parts if part[1])


def pieces(text: str) -> Iterator[str]:
    """Cut a long text where no token can cross: at a single line end, else between two words.

    The tokens of the pieces are those of the whole (both BPE patterns end a token there). Only a stretch of
    262,144 characters without either is cut blindly.
    """
    start = 0
    while len(text) - start > PIECE:
        end = _boundary(text, start, start + PIECE)
        yield text[start:end]
        start = end
    yield text[start:]


def _boundary(text: str, low: int, high: int) -> int:
    at = high
    while (at := text.rfind("\n", low + 1, at)) > low:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    *_, last = [None, *_WORDS.finditer(text, max(low, high - 4096), high)]
    return last.end() - 1 if last else high
