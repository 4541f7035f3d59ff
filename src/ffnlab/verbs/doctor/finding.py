"""What a check finds, and how it is judged."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "look", "bad"]
VERDICTS: tuple[Verdict, ...] = ("ok", "look", "bad")


@dataclass(frozen=True)
class Finding:
    """One measured number at one place. `look`: unusual, may be meant; `bad`: training suffers from it."""

    check: str
    where: str  # a layer, a module, a parameter, a step
    value: float
    expected: str
    verdict: Verdict = "ok"
    remedy: str = ""  # names the key of the configuration to change; empty where all is well
    shown: str = ""  # instead of the bare number
    off: float = 0.0  # how far it is from what is expected; compared within one check and verdict only

    @property
    def measured(self) -> str:
        return self.shown or f"{self.value:.3g}"

    def plain(self) -> dict[str, Any]:
        """For --json, which has no NaN: a value that is not finite is written as a string."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        rest = {key: getattr(self, key) for key in ("measured", "expected", "verdict", "remedy")}
        return {"check": self.check, "where": self.where, "value": value, **rest}


def within(value: float, look: tuple[float, float], bad: tuple[float, float]) -> Verdict:
    """ok inside the bounds `look`, bad outside the wider bounds `bad` or where value is not finite."""
    if not (math.isfinite(value) and bad[0] <= value <= bad[1]):
        return "bad"
    return "ok" if look[0] <= value <= look[1] else "look"


def worst(findings: Iterable[Finding]) -> list[Finding]:
    """The worst finding of every check, in the order in which the checks came."""
    found: dict[str, Finding] = {}
    for finding in findings:
        other = found.setdefault(finding.check, finding)
        if severity(finding) > severity(other):
            found[finding.check] = finding
    return list(found.values())


def severity(finding: Finding) -> tuple[int, float]:
    return VERDICTS.index(finding.verdict), finding.off


def distance(value: float, target: float) -> float:
    """How many factors of e lie between two magnitudes; infinite where one of them is 0 or not finite."""
    if not math.isfinite(value) or value == 0:
        return math.inf
    return abs(math.log(abs(value) / target))
