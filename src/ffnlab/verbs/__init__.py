"""The verbs of the command `ffnlab`, one module each: `add_arguments(parser)`, `run(args) -> exit code`, and
the docstring as help. Here stands what several of them share; heavy imports wait until a verb runs."""

from collections.abc import Mapping, Sequence
from typing import Any


def vocabulary(cfg: Mapping[str, Any], given: int | None) -> int:
    """The true vocabulary size: `given`, or that of the configured data (tokenised once and cached)."""
    if given is not None:
        return given
    from ffnlab import build
    from ffnlab.cache import cache_dir

    return build.dataset(cfg, cache_dir()).vocab_size


def show(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, numbers to the right: ruled and coloured on a terminal, plain text elsewhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold")
    console.print(table)


def quantity(value: float, unit: str = "") -> str:
    """`value` with a prefix k, M, G or T: quantity(9437184, 'FLOP') = '9.44 MFLOP'."""
    prefixes = iter(("", "k", "M", "G", "T"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and prefix != "T":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}".rstrip()


def mebibytes(size: int) -> str:
    """A number of bytes in MiB, or in GiB from 10 GiB on."""
    return f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
