"""How many neurons are active before training, and which threshold C makes it how many.

The pre-activation is taken as N(0, s^2), or, with D given, as that of one neuron with |w| = s over inputs
spread evenly on the sphere of radius sqrt(D), whose standard deviation is s too.
"""

import math
from typing import NamedTuple

from scipy.special import betaincinv, betaln, ndtr, ndtri

from ffnlab.analysis.geometry.sphere import share_above
from ffnlab.errors import UserError


def active_frac(c: float, s: float, d: int | None = None) -> float:
    """P(pre-activation > C) = 1 - Phi(C/s); with D P(z > C / (s sqrt(D))), z the dot product of unit vectors.

    A mean m of the pre-activations is subtracted from C: active_frac(c - m, s).
    """
    if s <= 0:
        raise UserError(f"s={s}: expected a standard deviation above 0")
    return float(ndtr(-c / s)) if d is None else share_above(c / (s * math.sqrt(d)), d)


def threshold_for(frac: float, s: float, d: int | None = None) -> float:
    """The C with that active fraction: s Phi^-1(1 - frac), or with D the exact one on the sphere.

    +-0.262 for 30 % and 70 % at s = 0.5 (E27, E28).
    """
    if not 0 < frac < 1:
        raise UserError(f"frac={frac}: expected a fraction between 0 and 1")
    if d is None:
        return 0.0 - s * float(ndtri(frac))  # 0, not -0, for a half
    half = (d - 1) / 2
    return s * math.sqrt(d) * (1 - 2 * float(betaincinv(half, half, frac)))


class Paired(NamedTuple):
    """Shares of tokens on which one unit, and at least one of an opposite pair, is active."""

    unit: float
    pair: float


def paired(c: float, s: float, d: int | None = None) -> Paired:
    """Coverage of the pair act(u - C), act(-u - C): both have p = P(u > C), one of them min(1, 2p).

    C = 0: 0.5 and 1, on every token one of the two (E34). C = 0.5, s = 0.5: 0.159 and 0.317 (E35).
    """
    unit = active_frac(c, s, d)
    return Paired(unit, min(1.0, 2 * unit))


def selected_shift(frac: float, d: int) -> float:
    """|E[x | w x > C]| / sqrt(D) of x evenly on the sphere of radius sqrt(D), with C such that w x > C for
    this share of them.

    It is E[z | z > t] = (1 - t^2)^((D - 1)/2) / ((D - 1) B(1/2, (D - 1)/2) frac), z the dot product of unit
    vectors with P(z > t) = frac: nearly phi(Phi^-1(frac)) / (frac sqrt(D)). 0.0179, 0.0288, 0.0418 and
    0.0633 for 70, 50, 30 and 10 % at D = 768: the fewer tokens a neuron answers to, the more they have in
    common (E53).
    """
    t = threshold_for(frac, 1, d) / math.sqrt(d)
    density = (d - 1) / 2 * math.log1p(-t * t) - float(betaln(0.5, (d - 1) / 2))
    return math.exp(density) / ((d - 1) * frac)


def mean_abs(s: float) -> float:
    """E|x| = s sqrt(2/pi) of x ~ N(0, s^2) (E71)."""
    return s * math.sqrt(2 / math.pi)


def sampling_sd(frac: float, n: int) -> float:
    """sqrt(a (1-a) / n): how far a neuron's active fraction on n independent tokens strays from its own a.

    0.044 for a = 0.5 on 128 tokens (E9); tokens of one text are not independent, so it strays farther.
    """
    return math.sqrt(frac * (1 - frac) / n)


def init_sd(scheme: str, d_model: int, d_ff: int) -> float:
    """s before training: sqrt(D) times the standard deviation of the weights as model.init draws them.

    uniform, normal: 0.5; he: sqrt 2; xavier: sqrt(2 D / (D + F)); gpt2: 0.02 sqrt(D), 0.554 at 768.
    """
    sds = {
        "uniform": 0.5,
        "normal": 0.5,
        "he": math.sqrt(2),
        "xavier": math.sqrt(2 * d_model / (d_model + d_ff)),
        "gpt2": 0.02 * math.sqrt(d_model),
    }
    if scheme not in sds:
        raise UserError(f"model.init={scheme!r}: expected one of {', '.join(sds)}")
    return sds[scheme]
