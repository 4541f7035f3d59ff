"""Small tables beside the record: CSV with a header, read back with its numbers."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffnlab.record.files import write_atomic


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, whole or not at all. UserError when the disk cannot take it."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a table that `write_table` wrote; what reads as a number is one."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text
