"""The sparse products against the dense ones, in float64 and by hand."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from ffnlab import kernels
from ffnlab.kernels import cpu, reference

OPS = torch.ops.ffnlab
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # PyTorch's own sparse tensors are in beta
SIZES = [0, 1, 2, 3, 7, 33, 100]  # of tokens
WIDTHS = [1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 100, 128, 130, 257, 300]
NEURONS = [1, 2, 5, 16, 17, 31, 64, 100, 300]


@pytest.fixture(autouse=True)
def threads():
    yield
    torch.set_num_threads(1)


def operands(tokens: int, d_model: int, rows: int, d_ff: int, dtype: torch.dtype, *, seed: int = 0):
    """x, up (rows, D), its bias, down (d_ff, D)."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    return draw(tokens, d_model), draw(rows, d_model), draw(rows), draw(d_ff, d_model)


def scattered(crow: Tensor, idx: Tensor, values: Tensor, n: int) -> Tensor:
    """The dense (T, n) matrix of a pattern, in float64, by PyTorch's own sparse tensors."""
    return torch.sparse_csr_tensor(crow, idx.long(), values.double(), (len(crow) - 1, n)).to_dense()


def close(got: Tensor, want: Tensor, dtype: torch.dtype, terms: int) -> None:
    """Equal within what sums of so many terms lose: in fp32, and in the rounding of bf16 results."""
    eps = 2**-8 if dtype == torch.bfloat16 else 2**-20
    scale = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(
        got.double(), want, rtol=eps, atol=eps * max(1.0, scale) * max(1, terms) ** 0.5
    )


def check_shape(tokens: int, d_model: int, d_ff: int, paired: bool, dtype: torch.dtype, c: float, seed: int):
    rows = (d_ff + 1) // 2 if paired else d_ff
    x, up, bias, down = operands(tokens, d_model, rows, d_ff, dtype, seed=seed)
    pattern = kernels.compact(x, up, bias, torch.tensor(c), d_ff)
    crow, idx, values = pattern
    pre = x @ up.T + bias if dtype == torch.float32 else torch.addmm(bias, x, up.T)
    pre = (torch.cat([pre, -pre], 1)[:, :d_ff] - torch.tensor(c).to(dtype)).double()
    # A pre-activation within rounding of C may fall on either side.
    hidden = scattered(crow, idx, values, d_ff)
    close(hidden, pre.clamp(min=0), dtype, d_model)
    assert all(bool((idx[a:b].diff() > 0).all()) for a, b in itertools.pairwise(crow))
    where = scattered(crow, idx, torch.ones_like(values), d_ff)
    close(kernels.spmm(crow, idx, values, down), hidden @ down.double(), dtype, d_ff)
    close(kernels.spmm_t(crow, idx, values, x, d_ff), hidden.T @ x.double(), dtype, tokens)
    close(kernels.column_sums(crow, idx, values, d_ff), hidden.sum(0), dtype, tokens)
    dots = scattered(crow, idx, kernels.sddmm(crow, idx, x, down), d_ff)
    close(dots, where * (x.double() @ down.double().T), dtype, d_model)


def shapes(n: int) -> list[tuple]:
    rng = random.Random(0)  # noqa: S311
    kinds = (torch.float32, torch.bfloat16)
    levels = (-20.0, -1.0, 0.0, 1.0, 5.0, 20.0)  # from nearly all neurons active to none
    return [
        (
            *(rng.choice(each) for each in (SIZES, WIDTHS, NEURONS)),
            rng.random() < 0.3,
            rng.choice(kinds),
            rng.choice(levels),
            i,
        )
        for i in range(n)
    ]


def test_products_on_random_shapes():
    for i, shape in enumerate(shapes(60)):
        torch.set_num_threads(1 + i % 3)
        check_shape(*shape)


@pytest.mark.slow
def test_products_on_a_thousand_shapes():
    for i, shape in enumerate(shapes(1000)):
        torch.set_num_threads(1 + i % 3)
        check_shape(*shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_shapes_pass_in_several_tiles(dtype: torch.dtype):
    """More rows than fit a tile, more columns than the registers hold, rows shared among threads."""
    torch.set_num_threads(3)
    check_shape(300, 390, 1500, False, dtype, 15.0, 0)
    pattern = reference.compact(*operands(50, 8, 9000, 9000, dtype)[:3], torch.tensor(2.0), 9000)
    dense = torch.randn(9000, 140).to(dtype)
    want = scattered(*pattern, 9000) @ dense.double()
    close(kernels.spmm(*pattern, dense), want, dtype, 9000)


@pytest.mark.parametrize(("rows", "d_ff"), [(5, 5), (4, 7), (4, 8)])
@pytest.mark.parametrize("scope", ["layer", "neuron"])
def test_derivatives_of_first_and_second_order(rows: int, d_ff: int, scope: str):
    torch.manual_seed(0)
    x, up, bias, down = (v.double().requires_grad_() for v in operands(6, 3, rows, d_ff, torch.float32))
    c = torch.randn((d_ff,) if scope == "neuron" else (), dtype=torch.float64, requires_grad=True)

    def unit(x, up, bias, c, down):
        crow, idx, pre = kernels.compact(x, up, bias, c, d_ff)
        gate = kernels.sddmm(crow, idx, x, down)
        return kernels.spmm(crow, idx, pre.square() * gate, down)

    assert torch.autograd.gradcheck(unit, (x, up, bias, c, down))
    if (rows, d_ff) == (4, 7):
        assert torch.autograd.gradgradcheck(unit, (x, up, bias, c, down))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_agree_with_the_reference(dtype: torch.dtype):
    x, up, bias, down = operands(40, 48, 64, 64, dtype)
    crow, idx, values = reference.compact(x, up, bias, torch.tensor(0.5), 64)
    for call in (
        lambda m: m.spmm(crow, idx, values, down),
        lambda m: m.sddmm(crow, idx, x, down),
        lambda m: m.spmm_t(crow, idx, values, x, 64),
        lambda m: m.column_sums(crow, idx, values, 64),
    ):
        torch.testing.assert_close(
            call(cpu), call(reference), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "c"), [(1, 5.0), (5, 5.0), (500, 5.0), (500, -5.0), (500, 30.0)])
def test_the_result_does_not_depend_on_the_number_of_threads(tokens: int, c: float, dtype: torch.dtype):
    """With few tokens columns are shared out, else rows; each density has tiles and sums of its own."""
    x, up, bias, down = operands(tokens, 390, 700, 700, dtype)
    crow, idx, values = reference.compact(x, up, bias, torch.tensor(c, dtype=dtype), 700)
    found = []
    for n in (1, 2, 3, 7):
        torch.set_num_threads(n)
        turned = cpu.transposed(crow.clone(), idx, 700)
        sums = kernels.column_sums(crow, idx, values, 700)
        back = kernels.spmm_t(crow, idx, values, x, 700)
        found.append(
            [*turned, sums, back, kernels.spmm(crow, idx, values, down), kernels.sddmm(crow, idx, x, down)]
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("few", [1, 2, 5])
def test_few_tokens_share_out_the_columns(few: int):
    torch.set_num_threads(3)
    check_shape(few, 300, 64, False, torch.float32, 0.0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_go_where_the_dense_products_send_them(dtype: torch.dtype):
    x, up, _, down = operands(4, 20, 33, 33, dtype)
    x[1, 3], x[2, 4], x[3, 5] = torch.nan, torch.inf, -torch.inf
    crow, idx, values = kernels.compact(x, up, None, torch.tensor(0.0), 33)
    assert crow[2] - crow[1] == 33  # no neuron of a token that is not a number counts as inactive
    dense = (x @ up.T).relu() @ down
    y = kernels.spmm(crow, idx, values, down)
    assert torch.isnan(y[1]).all()
    torch.testing.assert_close(y[2:].isfinite(), dense[2:].isfinite())
    torch.testing.assert_close(y[0], dense[0], rtol=2e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_strided_operands():
    x, up, bias, down = operands(9, 64, 50, 50, torch.float32)
    wide = torch.randn(9, 128)
    wide[:, ::2] = x
    plain = kernels.compact(x, up, bias, torch.tensor(0.0), 50)
    turned = kernels.compact(wide[:, ::2], up.T.contiguous().T, bias, torch.tensor(0.0), 50)
    assert all(torch.equal(a, b) for a, b in zip(plain, turned, strict=True))
    crow, idx, values = plain
    down_t = down.T.contiguous().T
    assert torch.equal(kernels.spmm(crow, idx, values, down), kernels.spmm(crow, idx, values, down_t))
    assert torch.equal(kernels.sddmm(crow, idx, x, down), kernels.sddmm(crow, idx, wide[:, ::2], down_t))


def test_operators_tell_the_truth_about_themselves():
    """Schemas, derivatives and the shapes that torch.compile is told."""
    x, up, bias, down = (v.requires_grad_() for v in operands(6, 8, 12, 12, torch.float32))
    crow, idx, values = (v.detach() for v in kernels.compact(x, up, bias, torch.tensor(0.0), 12))
    values.requires_grad_()
    c = torch.tensor(0.0, requires_grad=True)
    for op, args in (
        (OPS.compact, (x, up, bias, c, 12)),
        (OPS.spmm, (crow, idx, values, down)),
        (OPS.sddmm, (crow, idx, x, down)),
        (OPS.spmm_t, (crow, idx, values, x, 12)),
        (OPS.column_sums, (crow, idx, values, 12)),
        (OPS.spread, (crow, idx, bias)),
    ):
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        assert set(torch.library.opcheck(op.default, args, test_utils=tests).values()) == {"SUCCESS"}


def test_precisions_without_a_backend_are_refused_with_the_reason():
    assert kernels.unavailable(torch.device("cpu"), torch.float32) is None
    assert "fp32 and bf16" in str(kernels.unavailable(torch.device("cpu"), torch.float16))


def test_operands_of_two_precisions_are_refused():
    """On the CPU the kernel would read one as the other."""
    x, up, bias, down = operands(6, 8, 12, 12, torch.float32)
    crow, idx, values = kernels.compact(x, up, bias, torch.tensor(0.0), 12)
    with pytest.raises(TypeError, match="one precision"):
        kernels.spmm(crow, idx, values.bfloat16(), down)
    with pytest.raises(TypeError, match="one precision"):
        kernels.sddmm(crow, idx, x, down.bfloat16())
    with pytest.raises(TypeError, match="idx int32"):
        kernels.spmm_t(crow, idx.long(), values, x, 12)


def test_products_in_inference_mode():
    """Where tensors do not count their versions."""
    x, up, bias, _ = operands(6, 8, 12, 12, torch.float32)
    with torch.inference_mode():
        crow, idx, values = kernels.compact(x, up, bias, torch.tensor(0.0), 12)
        found = kernels.spmm_t(crow, idx, values, x, 12), kernels.column_sums(crow, idx, values, 12)
    crow, idx, values = kernels.compact(x, up, bias, torch.tensor(0.0), 12)
    torch.testing.assert_close(found[0], kernels.spmm_t(crow, idx, values, x, 12))
    torch.testing.assert_close(found[1], kernels.column_sums(crow, idx, values, 12))
