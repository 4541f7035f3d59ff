"""What a source of text offers, and how text is read from files."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from ffnlab.data.split import Document, Split
from ffnlab.errors import UserError


class TextSource(ABC):
    """Documents of text, in a fixed order that can be read several times."""

    name: str
    own_splits: frozenset[Split] = frozenset()  # the splits that the source marks itself

    @abstractmethod
    def describe(self) -> dict:
        """Name, options and identity of the files, as plain json values: part of the key of the cache."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The documents, none of them blank, with line ends as \\n."""

    @abstractmethod
    def where(self) -> str:
        """How a message names the source."""

    def total_bytes(self) -> int | None:
        """About how many bytes of text, for the progress bar; None where nobody knows."""
        return None

    def fractions(self, val_frac: float, test_frac: float) -> tuple[float, float]:
        """The fractions still to be held out: none for a split that the source brings."""
        return (0.0 if "val" in self.own_splits else val_frac), (
            0.0 if "test" in self.own_splits else test_frac
        )


def read_text(path: Path) -> str:
    """Text of a UTF-8 file: a byte-order mark is dropped, CRLF and CR become LF. Raises UserError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path} is UTF-16 (byte-order mark); expected UTF-8. {_convert(path, 'UTF-16')}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from behind the mark
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset} ({error.reason}). "
            f"{_convert(path, 'LATIN1')}"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{path} holds a NUL byte at offset {raw.index(0)}: that is a binary file or UTF-16 without a "
            "mark; expected UTF-8 text."
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _convert(path: Path, encoding: str) -> str:
    return f"Convert it from its real encoding, e.g. `iconv -f {encoding} -t UTF-8 {path.name} > utf8.txt`."
