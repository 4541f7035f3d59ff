import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ffnlab.errors import UserError
from ffnlab.nn.act.competing import Quantile, TopK
from ffnlab.nn.act.elu import XIELU
from ffnlab.nn.act.relu import LeakyReLU2, PReLU, SmoothReLU2, StarReLU
from ffnlab.nn.act.sigmoid import Swish
from ffnlab.nn.act.softplus import Softplus, Softplus2
from ffnlab.nn.norm import RMSNorm

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(p.stem for p in (CONFIGS / "act").glob("*.yaml"))


def phi(x):
    """The standard normal distribution function."""
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def softplus(x):
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def left(x, y):
    """x for x > 0, else y."""
    return torch.where(x > 0, x, y)


def top_tenth(x):
    """max(0, x) of the largest tenth of a row, by sorting."""
    kept = torch.zeros_like(x)
    best = x.argsort(-1, descending=True)[..., : max(1, round(0.1 * x.shape[-1]))]
    return kept.scatter(-1, best, x.gather(-1, best).clamp(min=0))


def above_quantile(x):
    """max(0, x - q) with the upper tenth of a normal distribution of the row's mean and variance."""
    mean = x.mean(-1, keepdim=True)
    normal = torch.distributions.Normal(mean, ((x - mean) ** 2).mean(-1, keepdim=True).sqrt())
    return (x - normal.icdf(torch.tensor(0.9, dtype=torch.float64))).clamp(min=0)


def share(x):
    """The softmax by its definition."""
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def standardised(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


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
    "prelu": lambda x: left(x, 0.25 * x),
    "relu6": lambda x: x.clamp(0, 6),
    "leaky_relu2": lambda x: x * x * torch.where(x > 0, 1, 0.25),
    "star_relu": lambda x: (2 * x.clamp(min=0) ** 2 - 1) / math.sqrt(5),
    "smooth_relu2": lambda x: x / 2 * (x + (x * x + 0.04).sqrt()),
    "gelu2": lambda x: (x * phi(x)) ** 2,
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "softplus": softplus,
    "softplus2": lambda x: softplus(x) ** 2,
    "mish": lambda x: x * (1 - 2 / (torch.exp(2 * softplus(x)) + 1)),
    "elu": lambda x: left(x, torch.exp(x) - 1),
    "selu": lambda x: 1.0507009873554805 * left(x, 1.6732632423543772 * (torch.exp(x) - 1)),
    "xielu": lambda x: 0.5 * x + 0.8 * torch.where(x > 0, x * x, torch.exp(x) - 1 - x),
    "solu": lambda x: x * share(x),
    "solu_norm": lambda x: standardised(x * share(x)),
    "top_k": top_tenth,
    "quantile": above_quantile,
}
# PyTorch's own, where it has one.
BUILT_IN = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "relu6": F.relu6,
    "tanh": F.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "swish": F.silu,
    "solu": lambda x: x * F.softmax(x, dim=-1),
}
GRID = torch.linspace(-6, 6, 4001, dtype=torch.float64)
COMPETING = {"solu", "solu_norm", "top_k", "quantile"}  # an output depends on the other neurons


@pytest.mark.parametrize("name", NAMES)
def test_equals_its_formula(name, make_act):
    assert name in FORMULAS, f"write the formula of act={name} into FORMULAS"
    act = make_act(name, len(GRID)).double()
    tolerance = 1e-7 if list(act.parameters()) else 1e-12  # their start is rounded to fp32
    torch.testing.assert_close(act(GRID), FORMULAS[name](GRID), rtol=tolerance, atol=tolerance)
    rows = torch.randn(3, 5, len(GRID), dtype=torch.float64)
    torch.testing.assert_close(act(rows), FORMULAS[name](rows), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BUILT_IN)
def test_equals_the_built_in(name, make_act):
    act = make_act(name, len(GRID)).double()
    torch.testing.assert_close(act(GRID), BUILT_IN[name](GRID), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_by_finite_differences(name, make_act):
    act = make_act(name, 8).double()
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x.data[x.abs() < 1e-3] = 0.5  # finite differences fail at a kink
    names, parameters = list(dict(act.named_parameters())), list(act.parameters())

    def f(x, *parameters):
        return torch.func.functional_call(act, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *parameters))
    assert torch.autograd.gradgradcheck(f, (x, *parameters))


def test_power_is_what_the_kernel_for_one_token_takes_it_for(make_act):
    named = {name: act.power for name in NAMES if (act := make_act(name, 9)).power is not None}
    assert named == {"relu": 1, "relu2": 2}
    x = torch.randn(7, 9)
    for name, power in named.items():
        assert torch.equal(make_act(name, 9)(x), x.clamp(min=0) ** power)


@pytest.mark.parametrize("name", NAMES)
def test_exact_zeros_is_what_it_says(name, make_act):
    """Where it says so, no output is negative and many are 0; elsewhere 0 is at most a point."""
    post = make_act(name, 601)(torch.linspace(-3, 3, 601))
    many_zeros = (post == 0).float().mean() > 0.4
    assert make_act(name, 601).exact_zeros == bool(many_zeros and (post >= 0).all())


# E68: the share of neurons without gradient before training, whose pre-activations are N(0, 0.5^2). Of all
# others (quantile too, whose threshold every neuron moves) each neuron has one.
NO_GRADIENT = {"relu": 0.5, "relu2": 0.5, "relu6": 0.5, "star_relu": 0.5, "top_k": 0.9}


@pytest.mark.parametrize("name", NAMES)
def test_share_of_zero_gradients_at_the_start(name, make_ffn):
    ffn, norm = make_ffn("mlp", name, d_model=64, d_ff=256), RMSNorm(64, gain=False, eps=1e-6)
    torch.nn.init.uniform_(ffn.up.weight, -math.sqrt(3) / 16, math.sqrt(3) / 16)  # sd 0.5 / sqrt 64
    pre = ffn.up(norm(torch.randn(512, 64))).detach().requires_grad_()
    assert pre.std().item() == pytest.approx(0.5, abs=0.01)
    weights = torch.rand(512, 256) + 0.5  # as the way down: no two neurons alike
    (grad,) = torch.autograd.grad((ffn.act(pre) * weights).sum(), pre)
    assert (grad == 0).float().mean().item() == pytest.approx(NO_GRADIENT.get(name, 0.0), abs=0.005)


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


MONOTONE = {
    *("relu", "relu2", "leaky_relu", "sigmoid", "identity", "prelu", "relu6", "star_relu", "smooth_relu2"),
    *("tanh", "softplus", "softplus2", "elu", "selu"),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COMPETING])
def test_monotone_or_not(name, make_act):
    """E68: the ReLU family rises everywhere; GELU, Swish, Mish and xIELU fall somewhere, and the squares of
    what takes both signs fall left of 0.
    """
    act = make_act(name, 1).double()
    assert bool((act(GRID.unsqueeze(-1)).squeeze(-1).diff() >= 0).all()) == (name in MONOTONE)


@pytest.mark.parametrize(
    ("name", "at", "lowest"),
    [("silu", -1.278, -0.278), ("gelu", -0.752, -0.170), ("mish", -1.192, -0.309), ("leaky_relu2", 0.0, 0.0)],
)
def test_lowest_where_the_docstring_says(name, at, lowest, make_act):
    post = make_act(name, 1)(GRID)
    assert GRID[post.argmin()].item() == pytest.approx(at, abs=2e-3)
    assert post.min().item() == pytest.approx(lowest, abs=6e-4)


def test_xielu_equals_hugging_face():
    """transformers clamps the left branch at -1e-6, hence the tolerance."""
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.XIELUActivation(alpha_p_init=0.7, alpha_n_init=1.1, beta=0.4, dtype=torch.float64)
    ours = XIELU(d_ff=1, positive=0.7, negative=1.1, beta=0.4).double()
    torch.testing.assert_close(ours(GRID), theirs(GRID).detach(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("frac", [0.05, 0.3])
def test_quantile_equals_the_statistical_top_k_of_gemma(frac):
    gemma = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    stand_in = type("Stand", (), {"activation_sparsity": 1 - frac})()
    x = torch.randn(7, 300, dtype=torch.float64) * 2 + 0.7
    expected = gemma.Gemma3nTextMLP._gaussian_topk(stand_in, x)
    torch.testing.assert_close(Quantile(d_ff=300, active_frac=frac)(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frac", [0.02, 0.1, 0.4])
def test_selective_activations_let_through_the_share_that_they_say(frac):
    x = torch.randn(400, 500, generator=torch.Generator().manual_seed(3))
    exactly = (TopK(d_ff=500, active_frac=frac)(x) > 0).sum(-1)
    assert (exactly == round(frac * 500)).all()
    about = (Quantile(d_ff=500, active_frac=frac)(x) > 0).float().mean().item()
    assert about == pytest.approx(frac, abs=0.003)  # sd of the mean of 200,000 draws at most 0.0011


def test_top_k_never_lets_a_negative_through_and_keeps_one_at_least():
    x = torch.tensor([[-3.0, -1.0, 2.0, 1.0], [-3.0, -1.0, -2.0, -1.5]])
    assert TopK(d_ff=4, active_frac=0.75)(x).tolist() == [[0, 0, 2, 1], [0, 0, 0, 0]]
    assert TopK(d_ff=4, active_frac=0.01)(x).tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]


def test_quantile_does_not_see_what_all_neurons_have_in_common(make_act):
    act, x = make_act("quantile", 50), torch.randn(4, 50, dtype=torch.float64)
    assert act.shift_invariant
    torch.testing.assert_close(act(x + 3.0), act(x))
    others = [n for n in NAMES if n != "quantile"]
    assert not any(make_act(n, 4).shift_invariant for n in others)


def test_star_relu_standardises_a_normal_input(make_act):
    post = make_act("star_relu", 1)(torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)))
    assert post.mean().item() == pytest.approx(0.0, abs=0.005)
    assert post.var().item() == pytest.approx(1.0, abs=0.015)


def test_selu_keeps_mean_and_variance_of_a_normal_input(make_act):
    post = make_act("selu", 1)(torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)))
    assert (post.mean().item(), post.var().item()) == pytest.approx((0.0, 1.0), abs=0.005)


@pytest.mark.parametrize(
    ("act", "limit"),
    [
        (SmoothReLU2(d_ff=1, width=1e-6), lambda x: x.clamp(min=0) ** 2),
        (Softplus(d_ff=1, beta=1e6), lambda x: x.clamp(min=0)),
        (Softplus2(d_ff=1, beta=1e6), lambda x: x.clamp(min=0) ** 2),
        (Swish(d_ff=1, beta=1e6), lambda x: x.clamp(min=0)),
        (Swish(d_ff=1, beta=0.0), lambda x: x / 2),
        (PReLU(d_ff=1, slope=0.0), lambda x: x.clamp(min=0)),
        (LeakyReLU2(d_ff=1, negative_slope=0.0), lambda x: x.clamp(min=0) ** 2),
        (StarReLU(d_ff=1, scale=1.0, bias=0.0), lambda x: x.clamp(min=0) ** 2),
    ],
)
def test_limits(act, limit):
    torch.testing.assert_close(act.double()(GRID), limit(GRID), atol=1e-5, rtol=1e-5)


def test_smooth_relu2_far_to_the_left(make_act):
    """-a^2/4, also where x + sqrt(x^2 + a^2) is below the resolution of fp32 and of bf16."""
    x = torch.tensor([-5.0, -100.0, -30_000.0], requires_grad=True)
    post = make_act("smooth_relu2", 1)(x)
    post.sum().backward()
    torch.testing.assert_close(post.detach(), torch.full((3,), -0.01), rtol=1e-3, atol=0)
    assert x.grad.isfinite().all()
    half = make_act("smooth_relu2", 1)(torch.tensor([-5.0], dtype=torch.bfloat16))
    assert half.item() == pytest.approx(-0.01, rel=0.02)


def test_learned_parameters_are_a_layers_own(make_ffn):
    learned = {"prelu": 1, "star_relu": 2, "swish": 1, "xielu": 2, "solu_norm": 2}
    for name in NAMES:
        one, other = (make_ffn("mlp", name).act for _ in range(2))
        assert len(list(one.parameters())) == learned.get(name, 0), name
        assert not {id(p) for p in one.parameters()} & {id(p) for p in other.parameters()}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TopK(d_ff=4, active_frac=0.0), "active_frac=0.0"),
        (lambda: Quantile(d_ff=4, active_frac=1.0), "active_frac=1.0"),
        (lambda: SmoothReLU2(d_ff=4, width=0.0), "width=0.0"),
        (lambda: Softplus(d_ff=4, beta=-1.0), "beta=-1.0"),
        (lambda: XIELU(d_ff=4, positive=0.8, negative=0.5, beta=0.5), "negative > beta"),
    ],
)
def test_impossible_numbers_are_named(make, named):
    with pytest.raises(UserError, match=named):
        make()


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

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_root_of_the_square_is_the_number(self, make_act, dtype):
        x = (torch.randn(40, 100) * torch.logspace(-15, 10, 100)).to(dtype).requires_grad_()
        make_act("relu2", 100)(x).backward(torch.ones_like(x))
        assert torch.equal(x.grad, 2 * x.detach().relu())

    def test_only_what_is_put_out_is_kept(self, make_act):
        x = torch.randn(4, 8, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = make_act("relu2", 8)(x)
        assert [t.data_ptr() for t in kept] == [y.data_ptr()]

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
