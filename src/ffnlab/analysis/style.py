"""How figures look: one style file, colours that everybody can tell apart, text that the font can show."""

import io
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

STYLE = Path(__file__).with_name("ffnlab.mplstyle")

# Okabe and Ito's colours, told apart with every kind of colour vision.
BLACK, BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = (
    "#000000",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)
GREY = "#888888"


def style() -> AbstractContextManager[None]:
    """The style file on top of matplotlib's defaults: a user's own matplotlibrc changes no figure."""
    return matplotlib.style.context(["default", STYLE])


def as_file(picture: Figure, kind: str, dpi: float | None = None, **metadata: Any) -> bytes:
    """A picture as the bytes of a file, in the style of all figures; `dpi`: other than that of the style."""
    buffer = io.BytesIO()
    with style():
        picture.savefig(buffer, format=kind, dpi=dpi or "figure", metadata=metadata or None)
    return buffer.getvalue()


def ordered(n: int) -> list[tuple[float, ...]]:
    """`n` colours from dark to light, also in grey; the palest of viridis are left out."""
    return [tuple(rgba) for rgba in matplotlib.colormaps["viridis"](np.linspace(0, 0.85, n))]


def visible(text: str) -> str:
    r"""Text with what cannot be seen, or has no glyph, written as in Python: '\n', '\u5b57'."""
    return "".join(c if c.isprintable() and ord(c) in _glyphs() else _escaped(c) for c in text)


def seen(text: str) -> str:
    r"""Text with what cannot be seen written as in Python: '\n', '\x00'; for pages, which have all glyphs."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def literal(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def printable(text: str, most: int | None = None) -> str:
    """The text of a token or a name in a figure; one longer than `most` characters ends in an ellipsis."""
    seen = visible(text)
    return literal(seen if most is None or len(seen) <= most else seen[: most - 1] + "…")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


@cache
def _glyphs() -> frozenset[int]:
    """The code points of both fonts that figures use."""
    maps = (set(get_font(findfont(name)).get_charmap()) for name in ("DejaVu Sans", "DejaVu Sans Mono"))
    return frozenset(set.intersection(*maps))
