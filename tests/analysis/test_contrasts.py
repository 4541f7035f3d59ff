"""What contrasts ask of the tests beneath them, arm by arm."""

import numpy as np
import pytest

from ffnlab.analysis import stats
from ffnlab.analysis.arms import Seed
from ffnlab.analysis.contrasts import POWER, Question, analyse

NOISE = np.random.default_rng(0).normal(0, 0.02, (3, 6))


def asked(lower_is_better: bool = True, margin: float | None = 0.01) -> Question:
    return Question(baseline="a", alpha=0.05, margin=margin, lower_is_better=lower_is_better)


def values(*arms: list[float], first: tuple[int, ...] = (0, 0, 0)) -> dict[str, dict[Seed, float]]:
    return {
        name: {Seed(seed, seed): value for seed, value in enumerate(own, start)}
        for name, own, start in zip("abc", arms, first, strict=False)
    }


def test_seeds_are_needed_for_holms_strictest_step():
    found = analyse(values(*(4 + NOISE).tolist()), asked())
    expected = stats.seeds_needed(found.residual_sd, 0.01, 0.05 / 2, POWER, arms=3)
    assert expected is not None
    assert [contrast.seeds_needed for contrast in found.contrasts.values()] == [expected, expected]


def test_unpaired_seeds_are_needed_at_the_mean_variance():
    found = analyse(values(*(4 + NOISE[:2]).tolist(), first=(0, 100, 0)), asked())
    sd = np.sqrt(np.mean([np.var(own, ddof=1) for own in NOISE[:2]]))
    expected = stats.seeds_needed(float(sd), 0.01, 0.05, POWER, paired=False)
    assert (found.contrasts["b"].method, found.contrasts["b"].seeds_needed) == ("unpaired", expected)


@pytest.mark.parametrize(("lower_is_better", "words"), [(True, "better worse"), (False, "lower higher")])
def test_the_words_of_a_difference(lower_is_better, words):
    spread = NOISE[0] / 10
    arms = (0.5 + spread, 0.3 + spread[::-1], 0.8 + spread[[1, 0, 3, 2, 5, 4]])
    found = analyse(values(*(arm.tolist() for arm in arms)), asked(lower_is_better, None))
    assert [contrast.verdict for contrast in found.contrasts.values()] == words.split()
