"""Every formula against torch, scipy's distributions, quadrature or Monte Carlo (seeded, with its error)."""

import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from scipy.integrate import quad

from ffnlab.analysis import geometry
from ffnlab.analysis.geometry.activations import COMPETING, FORMULAS
from ffnlab.errors import UserError
from ffnlab.nn.ffn.reglu import ReGLU
from ffnlab.nn.init import draw

ACTS = Path(__file__).resolve().parents[2] / "configs" / "act"
T = np.radians(np.linspace(-30, 90, 241))


def unit_vectors(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    x = rng.standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def from_yaml(name: str) -> torch.nn.Module:
    node = yaml.safe_load((ACTS / f"{name}.yaml").read_text())
    module, _, cls = node.pop("_target_").rpartition(".")
    part = getattr(__import__(module, fromlist=[cls]), cls)
    return part(d_ff=1, **node).double()


@pytest.mark.parametrize("name", sorted(path.stem for path in ACTS.glob("*.yaml")))
def test_every_activation_is_its_part_with_the_values_of_its_yaml(name: str) -> None:
    node = yaml.safe_load((ACTS / f"{name}.yaml").read_text())
    if name in COMPETING:
        with pytest.raises(UserError, match="no curve of its own"):
            geometry.configured(node)
        return
    x = torch.linspace(-8, 8, 2000, dtype=torch.float64, requires_grad=True)
    y = from_yaml(name)(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    found, configured = geometry.configured(node)
    for act in (geometry.activation(name), configured):
        np.testing.assert_allclose(act.value(x.detach().numpy()), y.detach().numpy(), rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(act.slope(x.detach().numpy()), slope.numpy(), rtol=1e-6, atol=1e-7)
    # silu has no option, which makes it swish with another name
    assert found == name
    assert set(inspect.signature(FORMULAS[name]).parameters) >= set(node) - {"_target_"}


def test_an_activation_may_be_any_function_and_not_any_name() -> None:
    act = geometry.activation(np.sin)
    np.testing.assert_allclose(act.slope(T), np.cos(T), atol=1e-9)
    with pytest.raises(UserError, match=r"'rellu2'\. Did you mean 'relu2'"):
        geometry.activation("rellu2")
    with pytest.raises(UserError, match=r"my_pkg\.ReLU2"):
        geometry.configured({"_target_": "my_pkg.ReLU2"})


def test_relu_has_its_steepest_slope_at_a_and_relu2_half_way() -> None:
    a, half, b = np.radians([0.0, 45.0, 90.0])
    t = np.array([a, half, b])
    relu = geometry.on_circle(t, geometry.activation("relu"))
    np.testing.assert_allclose(relu.slope, [1, math.sqrt(0.5), 0], atol=1e-15)
    relu2 = geometry.on_circle(t, geometry.activation("relu2"))
    np.testing.assert_allclose(relu2.value, [0, 0.5, 1], atol=1e-15)
    np.testing.assert_allclose(relu2.slope, [0, 1, 0], atol=1e-15)
    fine = np.linspace(a, b, 9001)
    slopes = geometry.on_circle(fine, geometry.activation("relu2")).slope
    assert math.degrees(fine[np.argmax(slopes)]) == pytest.approx(45, abs=0.01)


@pytest.mark.parametrize("name", ["relu", "relu2", "silu", "gelu"])
@pytest.mark.parametrize("between", [None, 0.0, 1.0])
def test_the_slope_adds_up_to_the_output(name: str, between: float | None) -> None:
    """By quadrature, at a radius and a threshold that matter; `between` is None without a gate."""
    act, radius, c = geometry.activation(name), 3.0, 0.7

    def curve(t: float) -> geometry.OnCircle:
        at = np.array([t])
        if between is None:
            return geometry.on_circle(at, act, radius=radius, c=c)
        return geometry.gated_on_circle(at, act, between=between, radius=radius, c=c)

    start, end, kink = -0.4, 1.3, geometry.boundary(c, radius)
    risen = quad(lambda t: curve(t).slope[0], start, end, points=[kink])[0]
    assert risen == pytest.approx(curve(end).value[0] - curve(start).value[0], abs=1e-9)
    assert radius * math.sin(kink) == pytest.approx(c)
    assert math.isnan(geometry.boundary(3.1, radius))


def test_a_gated_neuron_is_the_module_s() -> None:
    """An FFN with one neuron in the plane, its gate at 0 and its up direction at -50 degrees from it."""
    angle, radius = math.radians(50), 2.0
    ffn = ReGLU(d_model=2, d_ff=1, make_act=lambda _: torch.nn.SiLU(), bias=frozenset(), dropout=0.0).double()
    x = torch.tensor(np.stack([np.cos(T), np.sin(T)], axis=1)) * math.sqrt(2)
    with torch.no_grad():
        weights = {"gate": [0.0, 1.0], "up": [math.sin(angle), math.cos(angle)]}
        for name, w in weights.items():
            getattr(ffn, name).weight.copy_(torch.tensor([w], dtype=torch.float64) * radius / math.sqrt(2))
        expected = ffn.hidden(x)[:, 0].numpy()
    silu = geometry.activation("silu")
    found = geometry.gated_on_circle(T, silu, between=angle, radius=radius)
    np.testing.assert_allclose(found.value, expected, atol=1e-12)


def test_a_tied_gate_softens_the_boundary_and_one_at_right_angles_does_not() -> None:
    relu, relu2 = geometry.activation("relu"), geometry.activation("relu2")
    tied = geometry.gated_on_circle(T, relu, between=0.0)
    np.testing.assert_allclose(tied, geometry.on_circle(T, relu2), atol=1e-15)  # E43
    at_a = np.zeros(1)
    for degrees, expected in ((0, 0.0), (30, 0.5), (90, 1.0)):
        assert geometry.gated_on_circle(at_a, relu, between=math.radians(degrees)).slope[0] == (
            pytest.approx(expected, abs=1e-15)
        )
    for name in ("silu", "gelu"):  # act(0) = 0, act'(0) = 1/2
        curve = geometry.gated_on_circle(at_a, geometry.activation(name), between=math.pi / 2, radius=2.0)
        assert curve.slope[0] == pytest.approx(2.0)


@pytest.mark.parametrize(("d", "sd"), [(2, 0.7071), (3, 0.5774), (10, 0.316), (768, 0.0361)])
def test_dot_products_of_random_unit_vectors(d: int, sd: float) -> None:
    z = np.linspace(-0.99, 0.99, 199)
    reference = stats.beta((d - 1) / 2, (d - 1) / 2, loc=-1, scale=2)
    np.testing.assert_allclose(geometry.dot_density(z, d), reference.pdf(z), rtol=1e-9, atol=1e-300)
    shares = np.linspace(0.01, 0.99, 25)
    np.testing.assert_allclose(geometry.dot_quantile(shares, d), reference.ppf(shares), atol=1e-10)
    assert geometry.dot_sd(d) == pytest.approx(reference.std(), rel=1e-9)
    assert geometry.dot_sd(d) == pytest.approx(sd, abs=5e-4)
    assert geometry.share_above(0.1, d) == pytest.approx(reference.sf(0.1), rel=1e-9)
    assert (geometry.share_above(1.5, d), geometry.share_above(-1.5, d)) == (0, 1)
    rng = np.random.default_rng(0)
    dots = (unit_vectors(rng, 4000, d) * unit_vectors(rng, 4000, d)).sum(1)
    assert stats.kstest(dots, reference.cdf).pvalue > 0.01
    # a sample of n strays by 1/sqrt(2n) of its sd at most (the kurtosis is below the normal one)
    assert dots.std() == pytest.approx(geometry.dot_sd(d), rel=4 / math.sqrt(2 * 4000))
    assert np.abs(dots).mean() == pytest.approx(geometry.mean_abs_dot(d), rel=4 / math.sqrt(4000))
    assert (geometry.dot_density(np.array([-1.0, 1.0, 2.0]), d) == 0).all()


def test_dimensions_begin_with_two() -> None:
    for function in (geometry.dot_sd, geometry.mean_abs_dot):
        with pytest.raises(UserError, match="at least two"):
            function(1)


@pytest.mark.parametrize("d", [2, 3, 10, 768])
def test_inputs_by_angle_from_the_equator(d: int) -> None:
    def density(t: float) -> float:
        return float(geometry.angle_density(np.array([t]), d)[0])

    for angle in (0.01, 0.05, 1.0):
        outside = 2 * quad(density, angle, math.pi / 2, points=[min(5 / math.sqrt(d), 1.5)], epsabs=1e-14)[0]
        assert geometry.share_beyond(angle, d) == pytest.approx(outside, rel=1e-6, abs=1e-12)
    t = np.radians([-80.0, 10.0, 45.0])  # the density of sin t, by change of variables
    np.testing.assert_allclose(
        geometry.angle_density(t, d), geometry.dot_density(np.sin(t), d) * np.cos(t), rtol=1e-9, atol=1e-300
    )
    mean_abs = 2 * quad(lambda t: math.sin(t) * density(t), 0, math.pi / 2, points=[0.1])[0]
    assert geometry.mean_abs_dot(d) == pytest.approx(mean_abs, rel=1e-7)


def test_ten_degrees_are_nearly_five_standard_deviations_at_768() -> None:
    ten = math.radians(10)
    assert math.sin(ten) / geometry.dot_sd(768) == pytest.approx(4.8, abs=0.02)
    assert math.degrees(math.asin(geometry.dot_sd(768))) == pytest.approx(2.07, abs=0.005)
    beyond = geometry.share_beyond(ten, 768)
    assert beyond < 1e-5
    assert beyond == pytest.approx(stats.beta(0.5, 383.5).sf(math.sin(ten) ** 2), rel=1e-9)


def test_the_best_aligned_of_many_neurons() -> None:
    assert geometry.mean_largest_dot(1, 10) == pytest.approx(0, abs=1e-9)
    # In three dimensions z is uniform on [-1, 1]: the largest of n has the mean (n - 1) / (n + 1).
    assert geometry.mean_largest_dot(9, 3) == pytest.approx(0.8, rel=1e-7)
    largest = stats.norm.ppf(np.random.default_rng(0).random((400, 3072)).max(1)).mean()
    at_768 = geometry.mean_largest_dot(3072, 768)  # nearly that of 3072 normal numbers
    assert at_768 * math.sqrt(768) == pytest.approx(largest, rel=0.02)
    rng = np.random.default_rng(0)
    sample = (unit_vectors(rng, 400 * 64, 16)[:, 0]).reshape(400, 64).max(1)
    assert geometry.mean_largest_dot(64, 16) == pytest.approx(sample.mean(), abs=4 * sample.std() / 20)
    with pytest.raises(UserError, match="at least one neuron"):
        geometry.mean_largest_dot(0, 16)


def test_predicted_active_fractions() -> None:
    for c, s, expected in ((0, 0.5, 0.5), (0.262, 0.5, 0.30), (-0.262, 0.5, 0.70), (0.5, 0.5, 0.159)):
        assert geometry.active_frac(c, s) == pytest.approx(expected, abs=5e-4)
        outside = quad(lambda x, s=s: math.exp(-((x / s) ** 2) / 2) / s / math.sqrt(2 * math.pi), c, 9)[0]
        assert geometry.active_frac(c, s) == pytest.approx(outside, rel=1e-7)
    assert geometry.active_frac(-0.5, 0.5) == pytest.approx(0.841, abs=5e-4)
    assert geometry.active_frac(2, 0.5) == pytest.approx(3.2e-5, rel=0.02)
    assert geometry.threshold_for(0.3, 0.5) == pytest.approx(0.262, abs=5e-4)
    assert geometry.threshold_for(0.7, 0.5) == pytest.approx(-0.262, abs=5e-4)
    for d in (None, 2, 8, 768):
        for frac in (0.001, 0.3, 0.9):
            c = geometry.threshold_for(frac, 0.5, d)
            assert geometry.active_frac(c, 0.5, d) == pytest.approx(frac, rel=1e-9)
    assert str(geometry.threshold_for(0.5, 0.5)) == "0.0"
    for wrong in (0, 1):
        with pytest.raises(UserError, match="between 0 and 1"):
            geometry.threshold_for(wrong, 0.5)
    with pytest.raises(UserError, match="above 0"):
        geometry.active_frac(0, 0)


@pytest.mark.parametrize("d", [3, 8, 768])
def test_fractions_and_pairs_on_the_sphere(d: int) -> None:
    """A neuron with |w| = s over RMS-normed inputs; 4 binomial standard errors."""
    n, s = 20_000, 0.5
    x = unit_vectors(np.random.default_rng(1), n if d < 100 else 4000, d) * math.sqrt(d)
    pre = s * x[:, 0]
    assert pre.std() == pytest.approx(s, rel=0.04)
    for c in (-0.3, 0.0, 0.5):
        active, opposite = pre > c, -pre > c
        unit, pair = geometry.paired(c, s, d)
        for share, expected in ((active, unit), (opposite, unit), (active | opposite, pair)):
            error = 4 * math.sqrt(expected * (1 - expected) / len(pre))
            assert share.mean() == pytest.approx(expected, abs=error + 1e-9)
    if d == 768:
        assert geometry.active_frac(0.5, s, d) == pytest.approx(geometry.active_frac(0.5, s), rel=1e-3)


def test_pairs_cover_every_token_and_with_a_gap_a_third() -> None:
    assert geometry.paired(0, 0.5) == (0.5, 1.0)
    assert geometry.paired(0, 0.5, 768) == pytest.approx((0.5, 1.0), abs=1e-12)
    assert geometry.paired(0.5, 0.5) == pytest.approx((0.159, 0.317), abs=5e-4)


def test_sizes_and_sampling_errors() -> None:
    assert geometry.mean_abs(1.25) == pytest.approx(1.0, abs=0.003)
    folded = stats.halfnorm(scale=0.7)
    assert geometry.mean_abs(0.7) == pytest.approx(folded.mean(), rel=1e-12)
    binomial = stats.binom(128, 0.5)
    assert geometry.sampling_sd(0.5, 128) == pytest.approx(binomial.std() / 128, rel=1e-12)
    assert geometry.sampling_sd(0.5, 128) == pytest.approx(0.044, abs=5e-4)


@pytest.mark.parametrize(("frac", "at_768"), [(0.7, 0.0179), (0.5, 0.0288), (0.3, 0.0418), (0.1, 0.0633)])
def test_what_selected_inputs_have_in_common(frac: float, at_768: float) -> None:
    """E53, against the integral of the density of dot products, and the normal distribution."""
    shift = geometry.selected_shift(frac, 768)
    assert shift == pytest.approx(at_768, abs=5e-5)
    z = stats.norm.ppf(frac)
    assert shift == pytest.approx(stats.norm.pdf(z) / (frac * math.sqrt(768)), rel=0.003)
    t = geometry.threshold_for(frac, 1, 8) / math.sqrt(8)
    mean, _ = quad(lambda z: z * geometry.dot_density(np.array(z), 8), t, 1)
    assert geometry.selected_shift(frac, 8) == pytest.approx(mean / frac, rel=1e-6)


@pytest.mark.parametrize("scheme", ["uniform", "normal", "he", "xavier", "gpt2"])
def test_the_spread_before_training_is_that_of_the_weights_as_drawn(scheme: str) -> None:
    d, f = 96, 384
    rng = torch.Generator().manual_seed(0)
    w = draw(torch.Size((f, d)), scheme, residual_scale=1.0, rng=rng)
    x = torch.randn(2000, d, generator=rng)
    pre = (x / x.square().mean(1, keepdim=True).sqrt()) @ w.T
    # 36,864 weights: their sd strays by 1/sqrt(2 * 36864) = 0.4 %
    assert geometry.init_sd(scheme, d, f) == pytest.approx(pre.std().item(), rel=0.02)
    assert geometry.init_sd("gpt2", 768, 3072) == pytest.approx(0.554, abs=5e-4)
    with pytest.raises(UserError, match="one of uniform"):
        geometry.init_sd("zeros", d, f)
