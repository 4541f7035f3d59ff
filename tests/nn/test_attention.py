"""Attention against explicit softmax, expanded heads and masks; what its queries and keys look like before
training (E50); in what it is linear (E66)."""

import math
import re

import pytest
import torch
from torch import nn

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn.attention import Causal, attend, band
from ffnlab.nn.gpt import Context
from ffnlab.nn.init import draw
from ffnlab.nn.memory import LiveBytes
from ffnlab.validate import validate

TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=4", "model.seq_len=24"]


def make(**changes) -> Causal:
    """Attention of four heads of 8 without positions; weights are torch's own."""
    torch.manual_seed(0)
    options = {
        "layer": 2, "d_model": 32, "n_heads": 4, "seq_len": 24, "dropout": 0.0, "value_embedding": False,
        "position": "none", "rope_base": 1e4, "rope_frac": 1.0, "qk_norm": False, "bias": frozenset(),
        "scale": None, "gate": False, "n_kv_heads": None, "window": None, "long_layers": [],
    }  # fmt: skip
    return Causal(**{**options, **changes}).double()


def forward(attn: Causal, x: torch.Tensor) -> torch.Tensor:
    return attn(x, Context(torch.zeros(x.shape[:2], dtype=torch.long)))


def by_hand(attn: Causal, x: torch.Tensor, groups: int, window: int) -> torch.Tensor:
    """Every head, query and key in a loop."""
    out = torch.zeros_like(x)
    for h in range(4):
        rows = slice(8 * h, 8 * h + 8)
        g = h // (4 // groups)
        shared = slice(8 * g, 8 * g + 8)
        q, k, v = (x @ m.weight[s].T for m, s in ((attn.q, rows), (attn.k, shared), (attn.v, shared)))
        for t in range(x.shape[1]):
            seen = slice(max(0, t - window + 1), t + 1)
            weights = torch.softmax((k[:, seen] @ q[:, t, :, None]).squeeze(-1) / math.sqrt(8), dim=-1)
            out[:, t, rows] = (weights.unsqueeze(-1) * v[:, seen]).sum(1)
    return out @ attn.out.weight.T


@pytest.mark.parametrize("window", [None, 1, 5, 23, 24, 100])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_the_loop_over_heads_and_positions(groups: int, window: int | None):
    attn = make(n_kv_heads=groups, window=window)
    x = torch.randn(2, 24, 32, dtype=torch.float64)
    torch.testing.assert_close(forward(attn, x), by_hand(attn, x, groups, window or 24))
    assert attn.k.weight.shape == attn.v.weight.shape == (8 * groups, 32)


@pytest.mark.parametrize("window", [None, 6])
def test_shared_keys_are_repeated_keys(window: int | None):
    """The same as full attention whose k and v repeat each group's rows; positions and norms included."""
    options = {"position": "rope", "qk_norm": True, "gate": True, "window": window}
    few, full = make(n_kv_heads=2, **options), make(**options)
    state = few.state_dict()
    for name in ("k", "v"):
        rows = state[f"{name}.weight"].view(2, 8, 32)
        state[f"{name}.weight"] = rows.repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    x = torch.randn(2, 24, 32, dtype=torch.float64, requires_grad=True)
    y, expected = forward(few, x), forward(full, x)
    torch.testing.assert_close(y, expected)
    grads = [
        torch.autograd.grad(out.square().sum(), (x, m.k.weight)) for out, m in ((y, few), (expected, full))
    ]
    torch.testing.assert_close(grads[0][0], grads[1][0])
    torch.testing.assert_close(grads[0][1].view(2, 8, 32), grads[1][1].view(2, 2, 8, 32).sum(1))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_plain_bf16_attention_equals_the_fused_kernel(scale: float | None, window: int | None, groups: int):
    """Both paths against float64, forward and backward."""
    q, k, v = torch.randn(3, 2, 4, 40, 16, generator=torch.Generator().manual_seed(5))
    k, v = k[:, :groups], v[:, :groups]
    mask = None if window is None else band(40, window, q.device)
    results = {}
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (q, k, v)]
        out = attend(*leaves, mask, scale, 0.0)
        out.square().sum().backward()
        results[dtype] = [t.double() for t in (out.detach(), *(leaf.grad for leaf in leaves))]
    for exact, got in zip(*results.values(), strict=True):
        assert (got - exact).abs().max() < 0.02 * exact.abs().max()


def test_long_layers_and_short_inputs_have_no_window():
    assert make(window=5, long_layers=[2]).window is None
    assert make(window=24).window is None
    narrow = make(window=5, long_layers=[1, 3])
    assert narrow.window == 5
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(forward(narrow, x), by_hand(narrow, x, 4, 5))


def test_band_by_hand():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert band(4, 2, torch.device("cpu")).int().tolist() == expected


def test_windows_add_up_over_layers():
    """Four layers of window 3 see 4 * 2 positions back, and not one more."""
    cfg, _ = build.compose([*TINY, "attention.window=3", "model.zero_out=false"])
    model = build.model(cfg, 97).double().eval()
    x = torch.randint(97, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(x)[0, :, :97]
        x[0, 10] = (x[0, 10] + 1) % 97
        changed = (model(x)[0, :, :97] - logits).abs().amax(-1) > 0
    assert changed.nonzero().flatten().tolist() == list(range(10, 19))


def test_a_window_needs_no_memory_before_it_is_used_and_is_shared():
    """A mask of 131072^2 would take 16 GiB in each layer; the (T, T) of a pass is one for all layers."""
    long = ["model.n_layers=2", "model.d_model=8", "model.n_heads=2", "model.seq_len=131072"]
    cfg, _ = build.compose([*long, "attention.window=4096"])
    with LiveBytes() as live:
        model = build.model(cfg, 97)
    assert live.peak < 2**25
    ctx = Context(torch.zeros(1, 24, dtype=torch.long))
    model.stream(ctx.tokens, ctx)
    (mask,) = ctx.bands.values()
    assert mask.equal(torch.ones(24, 24).tril().bool())


def test_value_embeddings_are_as_wide_as_the_values():
    cfg, _ = build.compose([*TINY, "attention.n_kv_heads=1", "model.value_embeddings=[[1,3]]"])
    model = build.model(cfg, 97)
    assert model.parts["value_embeddings"].tables[0].weight.shape == (128, 8)
    x = torch.randint(97, (2, 24))
    assert model.loss(x, x).isfinite()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("attention.window=0", "attention.window=0: expected a number from 1"),
        ("attention.n_kv_heads=3", "attention.n_kv_heads=3 does not divide model.n_heads=4"),
        ("attention.long_layers=[4]", "attention.long_layers: layer 4 does not exist"),
    ],
)
def test_sizes_that_do_not_fit_are_named(override: str, problem: str):
    cfg, _ = build.compose([*TINY, override])
    with pytest.raises(UserError, match=re.escape(problem)):
        validate(cfg)


def test_linear_in_the_values_only():
    """E66: with fixed weights of attention the output is linear in v; in its input x it is not."""
    attn = make()
    x, y = torch.randn(2, 1, 24, 32, dtype=torch.float64)
    assert not torch.allclose(forward(attn, x + y), forward(attn, x) + forward(attn, y))
    assert not torch.allclose(forward(attn, 2 * x), 2 * forward(attn, x))
    outputs = []
    a, b = torch.randn(2, 32, 32, dtype=torch.float64)
    for weight in (a, b, a + 3 * b):
        attn.v.weight = nn.Parameter(weight)
        outputs.append(forward(attn, x))
    torch.testing.assert_close(outputs[2], outputs[0] + 3 * outputs[1])
    nn.init.zeros_(attn.q.weight)  # equal weights for all that is seen: now nothing but linear maps is left
    torch.testing.assert_close(forward(attn, x + 2 * y), forward(attn, x) + 2 * forward(attn, y))


class TestDirections:
    """E50: does the distribution of the entries of W (uniform or normal) make some directions of q = W x, or
    of k, more likely than others?

    Over draws of W: no. Normal entries give exactly uniform directions; uniform entries do as far as a sum
    over D inputs is normal: the fourth moment is about 1 % low at D = 128, but the corners of a cube show
    when x has one entry. Over inputs, for one W: yes, and alike for both: the spectrum of W W^T is that of
    Marchenko and Pastur, and the long axes of W get more of the directions. So the choice between the two
    does not matter.
    """

    K, D, N = 16, 128, 20_000

    def directions(self, scheme: str, x: torch.Tensor) -> torch.Tensor:
        """q / |q| of one input under N draws of a (K, D) matrix."""
        rng = torch.Generator().manual_seed(0)
        w = draw(torch.Size([self.N * self.K, self.D]), scheme, residual_scale=1.0, rng=rng)
        return nn.functional.normalize((w @ x).view(self.N, self.K), dim=-1)

    @pytest.mark.parametrize("scheme", ["uniform", "normal"])
    def test_uniform_on_the_sphere_over_draws(self, scheme: str):
        u = self.directions(scheme, torch.randn(self.D, generator=torch.Generator().manual_seed(1)))
        sd = 1 / math.sqrt(self.N)  # of a mean of N draws with sd 1
        assert u.mean(0).abs().max() < 5 * sd / math.sqrt(self.K)
        covariance = u.T @ u / self.N  # I / K on the sphere
        assert (covariance * self.K - torch.eye(self.K)).abs().max() < 5 * 1.5 * sd
        fourth = u.pow(4).mean().item() * self.K * (self.K + 2) / 3  # 1 on the sphere
        assert fourth == pytest.approx(1.0, abs=0.02)

    def test_a_cube_shows_only_where_x_has_one_entry(self):
        x = torch.zeros(self.D)
        x[0] = 1.0
        fourth = {
            scheme: self.directions(scheme, x).pow(4).mean().item() * self.K * (self.K + 2) / 3
            for scheme in ("uniform", "normal")
        }
        assert fourth["normal"] == pytest.approx(1.0, abs=0.02)
        assert fourth["uniform"] < 0.75  # towards the corners: all coordinates alike

    @pytest.mark.parametrize("matrix", ["q", "k"])
    @pytest.mark.parametrize("scheme", ["uniform", "normal"])
    def test_one_matrix_has_long_and_short_axes_under_both(self, scheme: str, matrix: str):
        """One head of 64 out of 256: eigenvalues of W W^T between (1 -+ sqrt(64/256))^2 of their mean."""
        sizes = ["model.n_layers=1", "model.d_model=256", "model.n_heads=4", "model.seq_len=8"]
        cfg, _ = build.compose([*sizes, f"model.init={scheme}"])
        w = getattr(build.model(cfg, 64).blocks[0]["attn"], matrix).weight[:64].detach().double()
        spectrum = torch.linalg.eigvalsh(w @ w.T)
        spectrum /= spectrum.mean()
        assert spectrum.min().item() == pytest.approx(0.25, abs=0.05)
        assert spectrum.max().item() == pytest.approx(2.25, abs=0.15)
