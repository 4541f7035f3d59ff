"""When the probes look."""

from itertools import pairwise

import pytest

from ffnlab.errors import UserError
from ffnlab.probe import ProbeSettings


def steps_of(every: int, steps: int, **changes: object) -> list[int]:
    values = {"every": 10, "every_step_until": 20, "schedule": "every", "tokens": 128, "scan_tokens": 0}
    settings = ProbeSettings(**{**values, "budget_gib": 1.0, **changes})
    return [step for step in range(steps + 1) if settings.due(step, every, steps)]


def test_default_cadence():
    assert steps_of(10, 300) == [*range(21), *range(30, 301, 10)]


def test_first_and_last_step_always():
    assert steps_of(10, 25, every_step_until=0) == [0, 10, 20, 25]
    assert steps_of(1000, 25, every_step_until=0, schedule="log") == [0, 1, 11, 25]


def test_log_looks_at_powers():
    """100 % is a factor of 2, 900 % of 10: exact powers count, whatever the logarithms round to."""
    assert steps_of(100, 1025, every_step_until=0, schedule="log") == [0, *(2**k for k in range(11)), 1025]
    assert steps_of(900, 10**4, every_step_until=0, schedule="log") == [0, *(10**k for k in range(5))]


def test_log_gaps_are_a_percentage_of_the_step():
    looks = steps_of(10, 10_000, schedule="log")
    assert looks[:21] == list(range(21))
    gaps = [(b - a) / a for a, b in pairwise(looks) if a >= 100]
    assert all(abs(gap - 0.1) < 0.02 for gap in gaps[:-1])
    assert abs(len([s for s in looks if 100 <= s < 10_000]) - 48) <= 1  # ln 100 / ln 1.1


def test_all_bad_settings_at_once():
    with pytest.raises(UserError) as error:
        ProbeSettings(every=0, every_step_until=-1, schedule="log", tokens=0, scan_tokens=-1, budget_gib=0.0)
    assert len(error.value.problems) == 5
