"""The GPU backend against the reference: on a GPU where there is one, else under Triton's interpreter.

`test_gpu.py` runs this file in a process of its own, since Triton must know before it is first imported.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ffnlab import kernels
from ffnlab.kernels import gpu, ops, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = (-30.0, -1.0, 0.0, 1.0, 30.0)  # from all neurons active to none
EPS = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # the interpreter truncates


def operands(tokens: int, d_model: int, rows: int, d_ff: int, dtype: torch.dtype, *, seed: int = 0):
    """x, up (rows, D), its bias, down (d_ff, D)."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    return draw(tokens, d_model), draw(rows, d_model), draw(rows), draw(d_ff, d_model)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal within the rounding of a result, measured at the largest one."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    finite = want[want.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    eps = EPS[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=eps, atol=eps * scale, equal_nan=True)


def products(crow: Tensor, idx: Tensor, values: Tensor, x: Tensor, down: Tensor) -> list[Callable]:
    """Each of the products of one pattern, as a function of the backend."""
    n = down.shape[0]
    return [
        lambda m: m.spmm(crow, idx, values, down),
        lambda m: m.sddmm(crow, idx, x, down),
        lambda m: m.spmm_t(crow, idx, values, x, n),
        lambda m: m.column_sums(crow, idx, values, n),
    ]


def check(x: Tensor, up: Tensor, bias: Tensor | None, c: Tensor, down: Tensor) -> float:
    """All products like the reference's; the density of the pattern."""
    dtype, d_ff = x.dtype, down.shape[0]
    want, got = (m.compact(x, up, bias, c, d_ff) for m in (reference, gpu))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert got[1].dtype == torch.int32
    close(got[2], want[2], dtype)
    for call in products(*want, x, down):
        close(call(gpu), call(reference), dtype)
    return want[1].numel() / max(1, x.shape[0] * d_ff)


def check_shape(tokens: int, d_model: int, d_ff: int, seed: int) -> float:
    rng = random.Random(seed)  # noqa: S311
    rows = (d_ff + 1) // 2 if rng.random() < 0.3 else d_ff
    x, up, bias, down = operands(tokens, d_model, rows, d_ff, KINDS[seed % 3], seed=seed)
    scope = (d_ff,) if rng.random() < 0.3 else ()
    c = torch.full(scope, rng.choice(LEVELS)) + torch.rand(
        scope, generator=torch.Generator().manual_seed(seed)
    )
    return check(x, up, bias if rng.random() < 0.5 else None, c.to(DEVICE), down)


def test_random_shapes():
    rng = random.Random(0)  # noqa: S311
    sizes = ([0, 1, 2, 3], [1, 2, 16, 17, 33], [1, 2, 3, 17])
    found = {check_shape(*(rng.choice(each) for each in sizes), seed) for seed in range(15)}
    assert {0.0, 1.0} < found


@pytest.mark.parametrize(
    ("tokens", "d_model", "d_ff", "seed"), [(2, 130, 2, 6), (1, 70, 5, 1), (20, 3, 1, 0)]
)
def test_several_tiles(tokens: int, d_model: int, d_ff: int, seed: int):
    check_shape(tokens, d_model, d_ff, seed)


@pytest.mark.slow
def test_larger_shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "PIECE", 16)
    rng = random.Random(1)  # noqa: S311
    sizes = ([1, 7, 16, 33], [1, 17, 64, 130], [1, 17, 40])
    for seed in range(30):
        check_shape(*(rng.choice(each) for each in sizes), seed)


def test_the_same_twice():
    x, up, bias, down = operands(20, 17, 3, 3, torch.float32)
    pattern = gpu.compact(x, up, bias, torch.tensor(0.0, device=DEVICE), 3)
    again = gpu.compact(x, up, bias, torch.tensor(0.0, device=DEVICE), 3)
    assert all(torch.equal(a, b) for a, b in zip(pattern, again, strict=True))
    for call in products(*pattern, x, down):
        assert torch.equal(call(gpu), call(gpu))


def test_more_neurons_than_a_program_compacts_at_a_time():
    x, up, bias, _ = operands(2, 3, 1100, 2200, torch.float32)
    got, want = (m.compact(x, up, bias, torch.tensor(0.3, device=DEVICE), 2200) for m in (gpu, reference))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_hot_neuron_is_summed_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """Neuron 2 active on all tokens, neuron 0 on none, the others here and there."""
    monkeypatch.setattr(gpu, "PIECE", 4)
    x, up, bias, down = operands(23, 5, 4, 4, torch.float32, seed=3)
    check(x, up, bias, torch.tensor([100.0, 0.0, -100.0, 1.0], device=DEVICE), down)
    turned = gpu.LAST.found
    assert turned is not None
    assert int(turned.pieces.diff().max()) == 4
    assert (turned.first.diff()[[0, 2]] == torch.tensor([0, 6], device=DEVICE)).all()


def test_the_shares_of_a_row_do_not_change_it(monkeypatch: pytest.MonkeyPatch):
    x, up, bias, down = operands(2, 40, 70, 70, torch.float32)
    crow, idx, _ = gpu.compact(x, up, bias, torch.tensor(-1.0, device=DEVICE), 70)
    shared = gpu.sddmm(crow, idx, x, down)
    monkeypatch.setattr(gpu, "PROGRAMS", 1)
    assert torch.equal(shared, gpu.sddmm(crow, idx, x, down))


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's NumPy says so
@pytest.mark.parametrize("dtype", KINDS)
def test_nan_and_infinity(dtype: torch.dtype):
    """They stay in their own rows and columns, also where a tile is not full."""
    x, up, _, down = operands(4, 20, 5, 5, dtype)
    x[1, 3], x[2, 4], down[4, 0] = torch.nan, torch.inf, -torch.inf
    check(x, up, None, torch.tensor(0.0, device=DEVICE), down)


def test_strided_operands():
    x, up, bias, down = operands(5, 12, 9, 9, torch.float32)
    wide = torch.randn(5, 24, device=DEVICE)
    wide[:, ::2] = x
    check(wide[:, ::2], up.T.contiguous().T, bias, torch.tensor(0.0, device=DEVICE), down.T.contiguous().T)


def test_derivatives_through_the_operators(monkeypatch: pytest.MonkeyPatch):
    """A gated unit of paired neurons, each with its own C."""
    c = torch.full((6,), 0.1, device=DEVICE)
    leaves = [v.requires_grad_() for v in (*operands(5, 7, 4, 6, torch.float32), c)]

    def grads(backend: object) -> list[Tensor]:
        monkeypatch.setattr(ops, "backend", lambda _: backend)
        x, up, bias, down, c = leaves
        crow, idx, pre = kernels.compact(x, up, bias, c, 6)
        y = kernels.spmm(crow, idx, pre.square() * kernels.sddmm(crow, idx, x, down), down)
        assert 0 < idx.numel() < 30
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    for got, want in zip(grads(gpu), grads(reference), strict=True):
        close(got, want, torch.float32)
