"""The statistics against scipy and statsmodels, and against what they promise, in simulated experiments."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from scipy import stats as reference
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower, TTestPower
from statsmodels.stats.weightstats import ttost_ind, ttost_paired

from ffnlab.analysis.stats import Additive, holm, seeds_needed, sign_flips, welch

SIMULATED = 20_000  # so a rate of 5 % is known to 0.15 %


def grid(n_arms: int, n_seeds: int, *missing: tuple[int, int]) -> tuple[list[str], list[int]]:
    """The arm and the seed of every run of an experiment in which some are missing."""
    cells = [(a, s) for a in range(n_arms) for s in range(n_seeds) if (a, s) not in missing]
    return [f"arm{a}" for a, _ in cells], [s for _, s in cells]


def losses(rng: np.random.Generator, arms: list[str], seeds: list[int], *size: int) -> np.ndarray:
    """Experiments without differences between arms, and with a seed effect much larger than the residual."""
    of_seed = rng.normal(4.0, 0.05, (*size, max(seeds) + 1))
    return of_seed[..., seeds] + rng.normal(0.0, 0.004, (*size, len(arms)))


def test_the_additive_model_is_that_of_statsmodels_with_runs_missing():
    arms, seeds = grid(4, 6, (0, 2), (1, 5), (3, 0), (3, 1))
    y = losses(np.random.default_rng(1), arms, seeds) + [0.01 * arms.index(arm) for arm in arms]
    table = pd.DataFrame({"y": y, "arm": arms, "seed": seeds})
    expected = smf.ols("y ~ C(arm, Treatment('arm1')) + C(seed)", table).fit()
    model = Additive(arms, seeds)
    assert model.df == expected.df_resid
    assert float(model.sd(y)) == pytest.approx(expected.mse_resid**0.5)
    for arm in ("arm0", "arm2", "arm3"):
        name, found = f"C(arm, Treatment('arm1'))[T.{arm}]", model.contrast(y, arm, "arm1")
        assert float(found.difference) == pytest.approx(expected.params[name])
        assert float(found.se) == pytest.approx(expected.bse[name])
        assert float(found.p()) == pytest.approx(expected.pvalues[name])
        assert [float(end) for end in found.interval(0.95)] == pytest.approx(
            list(expected.conf_int().loc[name])
        )


def test_two_arms_are_the_paired_t_test_and_its_equivalence_test():
    a, b = np.random.default_rng(2).normal(3.0, 0.01, (2, 7))
    found = Additive(["a"] * 7 + ["b"] * 7, [*range(7), *range(7)]).contrast(np.r_[a, b], "a", "b")
    assert float(found.p()) == pytest.approx(reference.ttest_rel(a, b).pvalue)
    for margin in (0.002, 0.01, 0.05):
        assert float(found.p_equivalence(margin)) == pytest.approx(ttost_paired(a, b, -margin, margin)[0])


def test_unpaired_arms_are_welchs_test_and_its_equivalence_test():
    rng = np.random.default_rng(3)
    a, b = rng.normal(3.0, 0.01, 5), rng.normal(3.01, 0.03, 9)
    expected = reference.ttest_ind(a, b, equal_var=False)
    found = welch(a, b)
    assert float(found.p()) == pytest.approx(expected.pvalue)
    assert [float(end) for end in found.interval(0.9)] == pytest.approx(
        list(expected.confidence_interval(0.9))
    )
    p, *_ = ttost_ind(a, b, -0.03, 0.03, usevar="unequal")
    assert float(found.p_equivalence(0.03)) == pytest.approx(p)


def test_holm_is_that_of_statsmodels():
    p = np.random.default_rng(4).uniform(0, 0.2, (5, 6))
    assert holm(p) == pytest.approx(np.array([multipletests(row, method="holm")[1] for row in p]))
    assert holm(np.empty(0)).shape == (0,)


def test_sign_flips_are_scipys_permutation_test():
    differences = np.random.default_rng(5).normal(0.5, 1.0, 8)
    expected = reference.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    found = sign_flips(differences)
    assert float(found.p) == expected.pvalue
    assert found.smallest == 2 / 2**8
    assert float(sign_flips(np.ones(6)).p) == sign_flips(np.ones(6)).smallest == 1 / 32
    assert float(sign_flips(np.zeros(6)).p) == 1.0
    assert float(sign_flips(np.array([0.1, 0.2, -0.3, 0.1, 0.2, -0.3])).p) == 1.0  # a sum of rounding


def test_from_17_seeds_on_signs_are_drawn_with_a_seed():
    differences = np.random.default_rng(6).normal(0.4, 1.0, 17)
    signs = 2.0 * (np.arange(2**17)[:, None] >> np.arange(17) & 1) - 1
    exact = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-12).mean()
    found = sign_flips(differences)
    assert float(found.p) == pytest.approx(exact, abs=5 * (exact / 2**16) ** 0.5)
    assert float(found.p) == float(sign_flips(differences).p)
    assert found.smallest == float(sign_flips(np.ones(30)).p) == 2**-16


@pytest.mark.parametrize(("sd", "alpha"), [(0.003, 0.05), (0.01, 0.05), (0.01, 0.0125), (0.04, 0.01)])
def test_the_seeds_needed_are_those_of_statsmodels(sd: float, alpha: float):
    paired, unpaired = seeds_needed(sd, 0.01, alpha), seeds_needed(sd, 0.01, alpha, paired=False)
    exact = TTestPower().solve_power(0.01 / (sd * 2**0.5), None, alpha, 0.8)
    assert paired == max(2, np.ceil(exact))
    assert unpaired == max(2, np.ceil(TTestIndPower().solve_power(0.01 / sd, None, alpha, 0.8)))
    pooled = seeds_needed(sd, 0.01, alpha, arms=5)
    power = [
        TTestPower().power(0.01 / (sd * 2**0.5), n, alpha, df=4 * (n - 1))
        for n in (pooled - 1, pooled)
        if n > 1
    ]
    assert power[-1] >= 0.8
    assert all(p < 0.8 for p in power[:-1])


def test_no_noise_and_hopeless_noise():
    assert seeds_needed(0.0, 0.01, 0.05) in (2, 3)
    assert seeds_needed(5.0, 0.01, 0.05) is None


def test_arms_that_are_equal_to_the_bit_are_equivalent_and_one_seed_says_nothing():
    arms, seeds = grid(3, 3)
    y = np.array([4.1, 3.9, 4.3, 4.1, 3.9, 4.3, 4.0, 3.8, 4.2])
    model = Additive(arms, seeds)
    same, other = model.contrast(y, "arm1", "arm0"), model.contrast(y, "arm2", "arm0")
    assert (float(same.difference), float(same.p()), float(same.p_equivalence(0.01))) == (0.0, 1.0, 0.0)
    assert float(other.difference) == pytest.approx(-0.1)
    assert (float(other.p()), float(other.p_equivalence(0.01))) == (0.0, 1.0)
    assert float(welch(np.ones(3), np.ones(3)).p()) == 1.0
    alone = Additive(["a", "b"], [0, 0])
    assert alone.df == 0
    assert np.isnan(alone.contrast(np.array([4.0, 4.1]), "b", "a").p())


@pytest.mark.parametrize("missing", [(), ((0, 4), (1, 0), (3, 2), (3, 3))])
def test_a_difference_is_found_where_there_is_none_in_5_percent(missing: tuple[tuple[int, int], ...]):
    arms, seeds = grid(4, 5, *missing)
    y = losses(np.random.default_rng(7), arms, seeds, SIMULATED)
    model = Additive(arms, seeds)
    found = [model.contrast(y, arm, "arm0") for arm in ("arm1", "arm2", "arm3")]
    p = np.stack([estimate.p() for estimate in found], -1)
    assert (p < 0.05).mean(0) == pytest.approx([0.05] * 3, abs=0.01)
    assert 0.03 < (holm(p) < 0.05).any(-1).mean() < 0.055  # any of the three: at most 5 %
    low, high = found[0].interval(0.95)
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("sign", [-1, 1])
def test_equivalence_is_found_at_the_margin_in_5_percent(sign: int):
    arms, seeds = grid(3, 6, (2, 1))
    y = losses(np.random.default_rng(8), arms, seeds, SIMULATED)
    at_margin = y + [sign * 0.03 if arm == "arm1" else 0.0 for arm in arms]
    model = Additive(arms, seeds)
    wrong = model.contrast(at_margin, "arm1", "arm0").p_equivalence(0.03) < 0.05
    assert wrong.mean() == pytest.approx(0.05, abs=0.01)
    assert (model.contrast(y, "arm1", "arm0").p_equivalence(0.03) < 0.05).mean() > 0.99
    a, b = np.random.default_rng(9).normal(0, 0.004, (2, SIMULATED, 6))
    assert (welch(a + sign * 0.03, b).p_equivalence(0.03) < 0.05).mean() == pytest.approx(0.05, abs=0.01)


def test_sign_flips_find_what_is_not_there_in_at_most_5_percent():
    p = sign_flips(np.random.default_rng(10).normal(0, 1, (4000, 8))).p
    assert (p <= 0.05).mean() == pytest.approx(12 / 256, abs=0.01)  # the largest multiple of 2/256


def test_the_seeds_needed_find_the_margin_in_80_percent():
    n = seeds_needed(0.008, 0.01, 0.05, arms=4)
    assert n is not None
    arms, seeds = grid(4, n)
    y = np.random.default_rng(11).normal(0, 0.008, (SIMULATED, len(arms)))
    y[:, [arm == "arm2" for arm in arms]] += 0.01
    found = (Additive(arms, seeds).contrast(y, "arm2", "arm0").p() < 0.05).mean()
    assert 0.79 < found < 0.87


def test_an_arm_that_scatters_is_found_and_none_is_where_none_does():
    arms, seeds = grid(4, 8, (1, 3))
    rng = np.random.default_rng(12)
    model = Additive(arms, seeds)
    p = [model.scatter(losses(rng, arms, seeds), "arm1")[1] for _ in range(1000)]
    assert reference.kstest(p, "uniform").pvalue > 0.001
    y = losses(rng, arms, seeds)
    y[[arm == "arm2" for arm in arms]] += rng.normal(0, 0.04, 8)
    ratio, found = model.scatter(y, "arm2")
    assert 5 < ratio < 20
    assert found < 1e-6
    assert np.isnan(Additive(*grid(2, 8)).scatter(y[:16], "arm1")[1])  # one of two: who knows which
