"""What a user can cause, said in one message: got, expected, what to do. `ffnlab.explain` finds all of it in
a command line.
"""

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence

SCREEN = 12  # problems shown at once; the rest is counted


class UserError(ValueError):
    """One or several problems that the user can mend; `problems` holds one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def closest(name: str, options: Iterable[str]) -> str | None:
    """The option that a mistyped name most likely meant, or None when nothing is near."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def nearest(name: str, options: Iterable[str]) -> str:
    """The hint `" Did you mean 'swiglu'?"` for a mistyped name, or "" when nothing is near."""
    close = closest(name, options)
    return f" Did you mean '{close}'?" if close else ""


def unknown(kind: str, name: str, options: Iterable[str]) -> str:
    """The message for a name that is not among `options`, with the nearest one and all of them."""
    options = sorted(options)
    return f"unknown {kind} '{name}'.{nearest(name, options)} Options: {', '.join(options) or '(none)'}."


def report(problems: Sequence[str], program: str) -> str:
    """The problems as one screen of text: one line for one, a list for several, each said once."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return f"{program}: {unique[0]}"
    lines = [f"  - {problem}" for problem in unique[:SCREEN]]
    if len(unique) > SCREEN:
        lines.append(f"  ... and {len(unique) - SCREEN} more")
    return "\n".join([f"{program}: {len(unique)} problems", *lines])


def internal(error: BaseException) -> str:
    """One line for an exception that no user can cause."""
    text = " ".join(str(error).split())
    return f"internal error: {type(error).__name__}: {text} (HYDRA_FULL_ERROR=1 shows where)"


def plain_warnings() -> None:
    """Show a warning as one line, without the place in the code that raised it."""

    def show(message: Warning | str, *place: object, **more: object) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
