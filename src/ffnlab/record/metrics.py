"""metrics.jsonl: one JSON object per log event, the truth that every figure is drawn from."""

import json
import math
import os
from io import FileIO
from pathlib import Path
from typing import Any

from ffnlab import foreign
from ffnlab.errors import UserError
from ffnlab.record.files import disk_error, write_atomic

_FIRST = (
    "step",
    "tokens",
    "time_s",
    "train/loss",
    "val/loss",
    "val/bits_per_byte",
    "optim/lr",
    "optim/grad_norm",
)
_GROUPS = ("train", "val", "test", "optim", "perf", "probe", "moe", "ffn")
_NOT_FINITE = "/nonfinite"
MOST_BYTES = 2**32  # a million steps of a kilobyte and more


class Metrics:
    """The rows of one run, appended with one write each, so that a killed process loses at most a torn last
    line.

    A value that is not finite has no JSON: it is written as null, and the key `<key>/nonfinite` beside it
    holds "nan", "inf" or "-inf"; `read` gives the float back. Keys stand in a fixed order (step, tokens,
    time_s, losses, optim, perf, probe, moe, ffn; then as given); numbers are plain ints and floats.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: FileIO | None = None

    def append(self, row: dict[str, Any]) -> None:
        """Write one row. Raises UserError when the disk is full; the file then ends with the row before."""
        line = (json.dumps(_encode(row), allow_nan=False) + "\n").encode()
        file = self._file or self._open()
        end = os.fstat(file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:]) or 0
        except OSError as error:
            file.truncate(end)
            raise disk_error(self.path, len(line), error) from error

    def sync(self) -> None:
        """Bring all rows to the disk itself: called at every checkpoint."""
        if self._file:
            os.fsync(self._file.fileno())

    def truncate(self, step: int) -> None:
        """Keep the rows up to and including `step`: a resume goes on from there. Drops a torn last line, and
        the row of the test: a run that goes on comes to its end, and is tested, again.
        """
        self.close()
        if not self.path.exists():
            return
        whole = self._lines()
        kept = [line for line, row in whole if row["step"] <= step and "test/loss" not in row]
        text = "".join(line + "\n" for line in kept)
        if text.encode() != self.path.read_bytes():
            write_atomic(self.path, text)

    def read(self) -> list[dict[str, Any]]:
        """All rows; a torn last line is left out. Raises UserError when another line is not a row."""
        return [_decode(row) for _, row in self._lines()] if self.path.exists() else []

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        try:
            if self.path.exists():
                os.truncate(
                    self.path, self.path.read_bytes().rfind(b"\n") + 1
                )  # a torn line must not take ours
            self._file = FileIO(self.path, "ab")
        except OSError as error:
            raise disk_error(self.path, 0, error) from error
        return self._file

    def _lines(self) -> list[tuple[str, dict[str, Any]]]:
        *whole, torn = foreign.read_bytes(self.path, most=MOST_BYTES).decode(errors="replace").split("\n")
        del torn  # what follows the last newline: nothing, or the row during which the process was killed
        rows = []
        for number, line in enumerate(whole, 1):
            row = as_row(line)
            if row is None:
                got = f"{self.path}: line {number} is not a metrics row: {line[:60]!r}"
                raise UserError(f"{got}: remove the lines from there on")
            rows.append((line, row))
        return rows


def numbers(row: dict[str, Any]) -> bool:
    """Whether all values are numbers or null, but for what names one that is not finite."""
    return all(
        value in ("nan", "inf", "-inf")
        if key.endswith(_NOT_FINITE)
        else value is None or isinstance(value, int | float)
        for key, value in row.items()
    )


def plain(value: Any) -> Any:
    """A number as Python's own int or float: zero-dimensional tensors and numpy scalars are unpacked."""
    return value.item() if hasattr(value, "item") else value


def as_row(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl as it was written; None where it is no row: no JSON object of numbers with a
    step.
    """
    try:
        row = foreign.parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int and numbers(row) else None


def _encode(row: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key in sorted(row, key=_rank):
        value = plain(row[key])
        if isinstance(value, float) and not math.isfinite(value):
            out[key], out[key + _NOT_FINITE] = None, str(value)
        else:
            out[key] = value
    return out


def _decode(row: dict[str, Any]) -> dict[str, Any]:
    for key in [key for key in row if key.endswith(_NOT_FINITE)]:
        row[key.removesuffix(_NOT_FINITE)] = float(row.pop(key))
    return row


def _rank(key: str) -> tuple[int, int]:
    """Position of a metric in its row: named ones first, then by group; sorting is stable within."""
    if key in _FIRST:
        return 0, _FIRST.index(key)
    group = key.partition("/")[0]
    return 1, _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)
