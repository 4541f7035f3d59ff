import pytest
import torch
from torch.nn import functional as F

from ffnlab import build
from ffnlab.nn.norm import DyT, LayerNorm, NoNorm, RMSNorm, rms_norm


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(rms_norm(x, 0.0), x / 12.5**0.5)


@pytest.mark.parametrize("gain", [False, True])
def test_rmsnorm_equals_pytorch(gain):
    norm = RMSNorm(32, gain=gain, eps=1e-6)
    if gain:
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 5, 32)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = norm(mine), F.rms_norm(theirs, (32,), norm.weight, 1e-6)
    grad = torch.randn_like(x)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rmsnorm_in_half_precision(dtype):
    x = (torch.randn(8, 256) * 100).to(dtype)  # the sum of squares overflows fp16
    y = rms_norm(x, 1e-6)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), F.rms_norm(x.float(), (256,), eps=1e-6), rtol=1e-2, atol=1e-2)


def test_rmsnorm_derivatives_by_finite_differences():
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, 1e-3), x)
    assert torch.autograd.gradgradcheck(lambda x: rms_norm(x, 1e-3), x)


def test_rmsnorm_without_gain_has_no_parameters_and_a_zero_stays_zero():
    norm = RMSNorm(8, gain=False, eps=1e-6)
    assert not list(norm.parameters())
    x = torch.zeros(2, 8, requires_grad=True)
    norm(x).sum().backward()
    assert torch.equal(norm(x), x)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_layernorm_by_hand(bias):
    norm = LayerNorm(16, gain=True, bias=bias, eps=1e-5)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(3, 16, dtype=torch.float64)
    norm.double()
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected + norm.bias if bias else expected)
    assert len(list(norm.parameters())) == 1 + bias


def test_layernorm_without_gain_has_no_parameters():
    assert not list(LayerNorm(16, gain=False, bias=False, eps=1e-5).parameters())


def test_layernorm_with_a_bias_alone():
    norm = LayerNorm(16, gain=False, bias=True, eps=1e-5)
    assert [name for name, _ in norm.named_parameters()] == ["bias"]
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,), eps=1e-5) + norm.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gain", [False, True])
def test_dyt_equals_its_formula(gain, bias):
    norm = DyT(16, gain=gain, bias=bias, init=0.3)
    assert len(list(norm.parameters())) == 1 + gain + bias
    assert norm.alpha.item() == pytest.approx(0.3)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(norm(x), (torch.exp(0.6 * x) - 1) / (torch.exp(0.6 * x) + 1))
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    g, b = norm.weight if gain else 1.0, norm.bias if bias else 0.0
    torch.testing.assert_close(norm(x), g * torch.tanh(norm.alpha * x) + b)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_dyt_derivatives_by_finite_differences():
    norm = DyT(6, gain=True, bias=True, init=0.5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def f(x, alpha, weight, bias):
        return torch.func.functional_call(norm, {"alpha": alpha, "weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(f, (x, norm.alpha, norm.weight, norm.bias))


def test_dyt_sees_the_length_of_its_input_and_a_norm_does_not():
    x = torch.randn(4, 16)
    dyt, rms = DyT(16, gain=False, bias=False, init=0.5), RMSNorm(16, gain=False, eps=0.0)
    torch.testing.assert_close(rms(5 * x), rms(x))
    assert dyt(5 * x).square().mean() > 1.5 * dyt(x).square().mean()


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        ("layernorm", {"weight", "bias"}),
        ("layernorm_gain", {"weight"}),
        ("layernorm_plain", set()),
        ("rmsnorm", set()),
        ("rmsnorm_gain", {"weight"}),
        ("dyt", {"alpha", "weight", "bias"}),
        ("none", set()),
    ],
)
def test_what_each_choice_learns(norm, names):
    """Per layer two norms, and the final one; each counts as a norm for the optimizer's groups."""
    cfg, _ = build.compose([f"norm={norm}", "model.n_layers=2", "model.d_model=32"])
    model = build.model(cfg, 64)
    learned = [n for n, _ in model.named_parameters() if ".norm." in n or n.startswith("norm.")]
    assert len(learned) == 5 * len(names)
    assert {n.rpartition(".")[2] for n in learned} == names


def test_nonorm_is_the_stream_itself():
    x = torch.randn(3, 8)
    assert NoNorm(8)(x) is x
