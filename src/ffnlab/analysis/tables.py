"""One table for the console, for a README (markdown), for a spreadsheet (CSV) and for a program (JSON)."""

import csv
import io
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A value of every row: its name in files, its name on paper, and how it is written there."""

    key: str
    header: str
    write: Callable[[Any], str] = str
    left: bool = False  # words to the left, numbers to the right


@dataclass(frozen=True)
class Table:
    """Rows of plain values by column; one that is absent or None is a dash on paper and empty in files."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def cells(self) -> list[list[str]]:
        """The rows as they are written on paper."""

        def cell(column: Column, value: Any) -> str:
            return "-" if value is None else column.write(value)

        return [[cell(column, row.get(column.key)) for column in self.columns] for row in self.rows]


def show(table: Table) -> None:
    """Print it: on a terminal headers are broken, and the last column of words folded, to fit; elsewhere
    nothing is.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    drawn = RichTable(box=None, pad_edge=False)
    cells = table.cells()
    folds = max((i for i, column in enumerate(table.columns) if column.left), default=0)
    for i, column in enumerate(table.columns):
        widest = max(6, *(len(row[i]) for row in cells))
        lines = textwrap.wrap(column.header, widest, break_long_words=False)
        drawn.add_column(
            Text("\n".join(lines) if console.is_terminal else column.header),
            justify="left" if column.left else "right",
            no_wrap=i != folds,
            overflow="fold",
        )
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))  # as text: an arm may be called stream=[a,b]
    console.print(Text(table.title, style="bold"))
    console.print(drawn)


def markdown(table: Table) -> str:
    """The table as GitHub draws it."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---" if column.left else "---:" for column in table.columns]
    return "\n".join(
        [line([column.header for column in table.columns]), line(rule), *map(line, table.cells())]
    )


def to_csv(table: Table) -> str:
    """Comma-separated, with the columns' keys above; numbers in full."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows([row.get(column.key) for column in table.columns] for row in table.rows)
    return text.getvalue()


def to_json(value: Any) -> str:
    """JSON of plain values; a number that is not finite is null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
