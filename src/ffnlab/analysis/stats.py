"""Is there a difference between two arms, or is there none? The additive model arm + seed, Holm's adjustment,
the equivalence test, the sign-flip test, and how many seeds a question needs.

All of it works on arrays over their last axis, so thousands of simulated experiments are one call.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special, stats

EXACT = 2**16  # sign patterns that are all tried; where there are more, one less than that many are drawn
MOST_SEEDS = 1000  # what `seeds_needed` still counts
_NOISE = 1e-12  # of the values' size: below it, a number is rounding

Array = Float[np.ndarray, "*experiments"] | np.float64  # a number for every experiment


class Estimate(NamedTuple):
    """A difference of two means, its standard error, and the degrees of freedom behind that."""

    difference: Array
    se: Array
    df: Array

    def p(self) -> Array:
        """Two-sided p of "the means are equal" (Student's t)."""
        return 2 * special.stdtr(self.df, -np.abs(_t(self.difference, self.se)))

    def interval(self, level: float) -> tuple[Array, Array]:
        """The confidence interval of the difference."""
        half = special.stdtrit(self.df, (1 + level) / 2) * self.se
        return self.difference - half, self.difference + half

    def p_equivalence(self, margin: float) -> Array:
        """p of "the means are at least `margin` apart": two one-sided t tests (Schuirmann 1987), the larger
        p of the two."""
        not_below = special.stdtr(self.df, -_t(self.difference + margin, self.se))
        not_above = special.stdtr(self.df, _t(self.difference - margin, self.se))
        return np.maximum(not_below, not_above)


class Additive:
    """value = mean + arm + seed + residual, by least squares; any (arm, seed) may be missing.

    A seed gives all arms the same tokens and the same first weights, so its effect is common to them: the
    arms are paired by construction. The residual variance is pooled over all arms. Two complete arms make
    this the paired t test.
    """

    def __init__(self, arms: Sequence[str], seeds: Sequence[object]):
        """The arm and the seed of every observation."""
        self.names, self.seeds = list(arms), list(seeds)
        self.arms, levels = list(dict.fromkeys(arms)), list(dict.fromkeys(seeds))
        of_arm = np.array([[arm == level for level in self.arms] for arm in arms])
        of_seed = np.array([[seed == level for level in levels] for seed in seeds])
        design = np.hstack([of_arm, of_seed]).astype(float)
        self.inverse = np.linalg.pinv(design)
        self.fit = design @ self.inverse
        self.df = len(design) - int(np.linalg.matrix_rank(design))

    def sd(self, values: Float[np.ndarray, "*experiments n"]) -> Array:
        """The pooled standard deviation of the residuals; NaN without degrees of freedom."""
        residuals = _without_noise(values - values @ self.fit, values)
        with np.errstate(invalid="ignore"):
            return np.sqrt(np.square(residuals).sum(-1) / (self.df or np.nan))

    def contrast(self, values: Float[np.ndarray, "*experiments n"], arm: str, baseline: str) -> Estimate:
        """arm - baseline; of two arms that no chain of common seeds joins it means nothing."""
        weights = self.inverse[self.arms.index(arm)] - self.inverse[self.arms.index(baseline)]
        difference = _without_noise((values @ weights)[..., None], values)[..., 0]
        return Estimate(difference, self.sd(values) * np.linalg.norm(weights), np.float64(self.df))

    def scatter(self, values: Float[np.ndarray, " n"], arm: str) -> tuple[float, float]:
        """How much more an arm scatters than the others: the ratio of its residual sd to theirs, and p of
        "it does not" (an F test of the residuals that it adds). NaN where too little is left of either, so
        with fewer than three arms.
        """
        if len(self.arms) < 3:
            return np.nan, np.nan
        kept = [i for i, name in enumerate(self.names) if name != arm]
        others = Additive([self.names[i] for i in kept], [self.seeds[i] for i in kept])
        theirs, added = others.df, self.df - others.df
        if not theirs or not added:
            return np.nan, np.nan
        rest = float(others.sd(values[kept])) ** 2
        own = (self.df * float(self.sd(values)) ** 2 - theirs * rest) / added
        ratio = own / rest if rest > 0 else np.inf if own > 0 else 1.0
        return float(np.sqrt(ratio)), float(stats.f.sf(ratio, added, theirs))


def welch(
    values: Float[np.ndarray, "*experiments n"], baseline: Float[np.ndarray, "*experiments m"]
) -> Estimate:
    """The difference of the means of two independent samples with variances of their own (Welch 1947)."""
    parts = [np.var(sample, axis=-1, ddof=1) / sample.shape[-1] for sample in (values, baseline)]
    freedom = [sample.shape[-1] - 1 for sample in (values, baseline)]
    variance = parts[0] + parts[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        df = variance**2 / sum(part**2 / free for part, free in zip(parts, freedom, strict=True))
    return Estimate(
        values.mean(-1) - baseline.mean(-1),
        np.sqrt(variance),
        np.where(variance > 0, df, float(sum(freedom))),
    )


def holm(p: Float[np.ndarray, "*experiments k"]) -> Float[np.ndarray, "*experiments k"]:
    """p adjusted for k questions (Holm 1979): reject where it is below alpha, and the chance of any false
    rejection is at most alpha."""
    order = np.argsort(p, axis=-1)
    stepped = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(stepped, axis=-1).clip(max=1.0), -1)
    return adjusted


class Flips(NamedTuple):
    """p of a sign-flip test, and the smallest p that it could have given."""

    p: Array
    smallest: float


def sign_flips(differences: Float[np.ndarray, "*experiments n"], seed: int = 0) -> Flips:
    """p of "the paired differences are symmetric about 0", two-sided, from their sum under flipped signs.

    Up to EXACT sign patterns all are tried: exact. Beyond, EXACT - 1 patterns are drawn from a generator
    with this seed, and p = (b + 1) / (drawn + 1) for the b that are as extreme (Phipson and Smyth 2010).
    """
    n = differences.shape[-1]
    exact = 2**n <= EXACT
    if exact:
        ones = np.arange(2**n)[:, None] >> np.arange(n) & 1
    else:
        ones = np.random.default_rng(seed).integers(0, 2, (EXACT - 1, n))
    sums = np.abs(differences @ (2.0 * ones - 1).T)
    seen = np.abs(differences.sum(-1, keepdims=True))
    rounding = _NOISE * np.abs(differences).sum(-1, keepdims=True)
    extreme = (sums >= seen - rounding).sum(-1)
    return Flips(extreme / 2**n, 2 / 2**n) if exact else Flips((extreme + 1) / EXACT, 1 / EXACT)


def seeds_needed(
    sd: float, difference: float, alpha: float, power: float = 0.8, arms: int = 2, paired: bool = True
) -> int | None:
    """The fewest seeds at which a t test at level alpha, two-sided, finds a true `difference` with this
    power.

    `sd` is that of the residuals: sqrt(2) sd is that of a paired difference. The pooled variance of `arms`
    paired arms has (arms - 1)(n - 1) degrees of freedom, that of two unpaired ones 2(n - 1). None: more than
    MOST_SEEDS.
    """
    n = np.arange(2, MOST_SEEDS + 1)
    df = (n - 1) * (arms - 1 if paired else 2)
    critical = special.stdtrit(df, 1 - alpha / 2)
    with np.errstate(divide="ignore"):
        shift = np.minimum(difference / (sd * np.sqrt(2 / n)), 10 * critical)  # beyond that the power is 1
    enough = np.flatnonzero(stats.nct.sf(critical, df, shift) >= power)  # found with its true sign
    return int(n[enough[0]]) if len(enough) else None


def _t(difference: Array, se: Array) -> Array:
    """difference / se, where 0 / 0 is 0: arms that are equal to the bit differ by nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((difference == 0) & (se == 0), 0.0, difference / se)


def _without_noise(
    numbers: Float[np.ndarray, "*experiments k"], values: Float[np.ndarray, "*experiments n"]
) -> Float[np.ndarray, "*experiments k"]:
    """0 for what is rounding beside the values, so that equal arms have no variance instead of a tiny one."""
    size = np.abs(values).max(-1, keepdims=True)
    return np.where(np.abs(numbers) < _NOISE * size, 0.0, numbers)
