import math
from pathlib import Path

import pytest
import torch

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(p.stem for p in (CONFIGS / "act").glob("*.yaml"))


def phi(x):
    """The standard normal distribution function."""
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


# Written out by hand; an activation without a line here is not tested against its formula, and fails.
FORMULAS = {
    "relu": lambda x: torch.where(x > 0, x, 0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "identity": lambda x: x,
}
GRID = torch.linspace(-6, 6, 4001, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_equals_its_formula(name, make_act):
    assert name in FORMULAS, f"write the formula of act={name} into FORMULAS"
    torch.testing.assert_close(make_act(name, 1)(GRID), FORMULAS[name](GRID), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_by_finite_differences(name, make_act):
    act = make_act(name, 8)
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x.data[x.abs() < 1e-3] = 0.5  # finite differences fail at a kink
    assert torch.autograd.gradcheck(act, x)
    assert torch.autograd.gradgradcheck(act, x)


@pytest.mark.parametrize("name", NAMES)
def test_exact_zeros_is_what_it_says(name, make_act):
    act, x = make_act(name, 1), torch.linspace(-3, 3, 601)
    zero_when_inactive = bool((act(x)[x < 0] == 0).all())
    assert act.exact_zeros == zero_when_inactive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_keeps_shape_and_dtype(name, dtype, make_act):
    x = torch.randn(2, 3, 8, dtype=dtype)
    y = make_act(name, 8)(x)
    assert y.shape == x.shape
    assert y.dtype == dtype


def test_tanh_form_of_gelu_is_within_1e_3_of_the_exact_one(make_act):
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    gap = (make_act("gelu", 1)(x) - make_act("gelu_tanh", 1)(x)).abs().max().item()
    assert 1e-4 < gap < 1e-3  # E58; 4.7e-4


@pytest.mark.parametrize(
    ("name", "monotone"),
    [
        ("relu", True),
        ("relu2", True),
        ("leaky_relu", True),
        ("sigmoid", True),
        ("gelu", False),
        ("silu", False),
    ],
)
def test_monotone_or_not(name, monotone, make_act):
    assert bool((make_act(name, 1)(GRID).diff() >= 0).all()) == monotone  # E68


def test_silu_is_lowest_where_the_docstring_says(make_act):
    assert GRID[make_act("silu", 1)(GRID).argmin()].item() == pytest.approx(-1.278, abs=2e-3)


class TestSquaredReLU:
    """The hand-written backward of relu2 stands for `relu(x).square()` wherever that could stand."""

    def test_same_bits_as_autograd(self, make_act):
        x = torch.randn(64, 32)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        grad = torch.randn(64, 32)
        y, expected = make_act("relu2", 32)(mine), theirs.relu().square()
        y.backward(grad)
        expected.backward(grad)
        assert torch.equal(y, expected)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=0)

    def test_no_grad_keeps_nothing(self, make_act):
        x = torch.randn(4, 8, requires_grad=True)
        with torch.no_grad():
            y = make_act("relu2", 8)(x)
        assert y.grad_fn is None

    def test_under_autocast(self, make_act):
        up, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = make_act("relu2", 8)(up(x))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert up.weight.grad.dtype == torch.float32
