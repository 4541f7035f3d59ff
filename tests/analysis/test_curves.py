"""What a difference is worth, on curves whose answer is known."""

import numpy as np
import pytest

from ffnlab.analysis.curves import Steps, equivalent_steps, first_at

STEPS = np.arange(0, 401, 50)


def test_on_a_straight_line_the_step_is_exact():
    losses = 6.0 - 0.01 * STEPS
    for target in (6.0, 4.321, 3.3, 2.0):
        assert equivalent_steps(STEPS, losses, target).step == pytest.approx((6.0 - target) / 0.01)


def test_on_a_smooth_curve_it_is_near_and_monotone():
    losses = 3.0 + 4.0 * np.exp(-STEPS / 120)
    targets = np.linspace(losses[-1], losses[0], 200)
    found = np.array([equivalent_steps(STEPS, losses, target).step for target in targets])
    assert (np.diff(found) < 0).all()
    inside = targets > losses[-1] + 0.01
    exact = -120 * np.log((targets[inside] - 3.0) / 4.0)
    assert np.abs(found[inside] - exact).max() < 5  # a tenth of the distance between two validations


def test_it_is_never_extrapolated():
    losses = 6.0 - 0.01 * STEPS
    assert equivalent_steps(STEPS, losses, 1.99) == Steps(400.0, beyond=True)
    assert equivalent_steps(STEPS, losses, 7.0) == Steps(0.0, beyond=False)


def test_a_noisy_curve_is_made_monotone_and_a_plateau_counts_from_its_start():
    losses = np.array([6.0, 5.0, 4.0, 4.2, 3.8, 3.0, 3.0, 3.0, 3.0])
    assert equivalent_steps(STEPS, losses, 3.0) == Steps(250.0, beyond=False)
    assert equivalent_steps(STEPS, losses, 4.1).step == 100.0  # 4.0 and 4.2 are one level, 4.1
    flat = np.full(len(STEPS), 5.0)
    assert equivalent_steps(STEPS, flat, 5.0) == Steps(0.0, beyond=False)
    assert equivalent_steps(STEPS, flat, 4.9).beyond


def test_the_first_crossing_lies_on_a_straight_line_between_two_validations():
    x, losses = np.array([0.0, 10.0, 20.0, 30.0]), np.array([7.0, 5.0, 5.5, 4.0])
    assert first_at(x, losses, 6.0) == 5.0
    assert first_at(x, losses, 5.0) == 10.0
    assert first_at(x, losses, 4.75) == 25.0
    assert first_at(x, losses, 8.0) == 0.0
    assert first_at(x, losses, 3.9) == float("inf")
    assert first_at(x, np.array([np.nan, np.inf, 5.0, 4.0]), 6.0) == 20.0
