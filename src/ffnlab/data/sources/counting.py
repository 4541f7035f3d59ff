"""A synthetic text that a model learns in a few dozen steps: to test that learning works at all."""

from collections.abc import Iterator

import numpy as np

from ffnlab.data.sources.base import TextSource
from ffnlab.data.split import Document
from ffnlab.errors import UserError


class Counting(TextSource):
    """`n_documents` lines of 16 numbers that count upwards from a random start below `max_start`.

    After a line's first number everything but the end is determined.
    """

    name = "counting"

    def __init__(self, *, n_documents: int, max_start: int, grammar_seed: int):
        for option, value, least in (
            ("n_documents", n_documents, 1),
            ("max_start", max_start, 1),
            ("grammar_seed", grammar_seed, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise UserError(f"data.{option}={value}: expected a whole number of at least {least}.")
        self.n_documents, self.max_start, self.grammar_seed = n_documents, max_start, grammar_seed

    def describe(self) -> dict:
        return {
            "name": self.name,
            "n_documents": self.n_documents,
            "max_start": self.max_start,
            "grammar_seed": self.grammar_seed,
        }

    def documents(self) -> Iterator[Document]:
        # raw numbers of the bit generator: the only ones that numpy promises to keep over its versions
        raw = np.random.PCG64(self.grammar_seed).random_raw(self.n_documents)
        for start in (raw % np.uint64(self.max_start)).tolist():
            yield Document(" ".join(str(start + i) for i in range(16)) + "\n")

    def where(self) -> str:
        return "data=counting"
