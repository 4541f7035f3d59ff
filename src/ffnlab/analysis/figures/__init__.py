"""The figures, each a function of a run that a decorator puts on the list.

A new one is a function in a module of this folder:

    @figure("C of every layer over the steps (E15, E16).")
    def threshold(run: Run, options: Options) -> Drawing: ...

It raises `Missing` when the run does not hold what it needs, with what to record. `ffnlab.analysis.panels`
holds what figures are made of, `choices` what they look up in a run, `pictures` makes files of them.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.figure import Figure

from ffnlab.analysis.runs import Run
from ffnlab.analysis.style import style
from ffnlab.errors import UserError


class Missing(UserError):
    """The run did not record what a figure needs, which is no fault when all figures are asked for.

    `record` is what would: an override such as probe=[default,trace].
    """

    def __init__(self, problem: str, record: str = ""):
        super().__init__(problem)
        self.record = record


class Drawing(NamedTuple):
    """A picture and the caption that states what was measured, over what, in which unit.

    Each of the `frames` of a moving picture makes it show the next state; as it is given it shows the last.
    """

    picture: Figure
    caption: str
    frames: tuple[Callable[[], None], ...] = ()


@dataclass(frozen=True)
class Options:
    """What a user may choose; a figure takes what it needs. None: the figure's own choice."""

    layers: tuple[str, ...] | None = None  # L00, L11
    neuron: int | None = None
    tokens: tuple[int, ...] | None = None  # places in the probe batch
    act: str | None = None  # geometry: another activation than the run's
    c: float | None = None  # geometry: another threshold than the run's


Draw = Callable[[Run, Options], Drawing]


class Entry(NamedTuple):
    """A figure on the list."""

    shows: str  # one sentence, with its number in the list of experiments
    draw: Draw


_entries: dict[str, Entry] = {}
# The modules of this folder as one reads a report: how it went, what neurons did, what holds for any run.
# Others come before the last two.
ORDER = (
    *("training", "activity", "scalars", "preacts", "traces", "weights", "tokens", "interventions"),
    *("directions", "geometry"),
)


def figure(shows: str) -> Callable[[Draw], Draw]:
    """Puts a function on the list under its own name; it draws in the style of `ffnlab.mplstyle`."""

    def enter(draw: Draw) -> Draw:
        @functools.wraps(draw)
        def styled(run: Run, options: Options) -> Drawing:
            with style():
                return draw(run, options)

        _entries[draw.__name__] = Entry(shows, styled)
        return styled

    return enter


def entries() -> dict[str, Entry]:
    """All figures by name, in reading order; imports the modules of this folder on first use."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

    def place(entry: Entry) -> float:
        module = entry.draw.__module__.rpartition(".")[2]
        return ORDER.index(module) if module in ORDER else len(ORDER) - 2.5

    return dict(
        sorted(_entries.items(), key=lambda item: place(item[1]))
    )  # within a module as they stand there
