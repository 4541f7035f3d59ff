from pathlib import Path

import pytest
import torch
from torch import nn

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn.act.relu import ReLU, ReLU2
from ffnlab.nn.init import SCHEMES
from ffnlab.nn.threshold import FixedThreshold, LearnedThreshold, NoThreshold, calibrate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ACTS = sorted(p.stem for p in (CONFIGS / "act").glob("*.yaml"))
MAKERS = [FixedThreshold, LearnedThreshold]


class Layers(nn.Module):
    """tokens (B, T) -> embedding -> FFN-like layers in a residual stream, each with its own width."""

    def __init__(self, maker, widths=(32, 48, 64), d=24):
        super().__init__()
        self.embed = nn.Embedding(200, d)
        self.up = nn.ModuleList(nn.Linear(d, F) for F in widths)
        self.act = nn.ModuleList(maker(ReLU2(d_ff=F), F) for F in widths)
        self.down = nn.ModuleList(nn.Linear(F, d) for F in widths)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for up, act, down in zip(self.up, self.act, self.down, strict=True):
            x = x + down(self.dropout(act(up(x))))
        return x


def active_fractions(model, tokens):
    """The fraction of post-activations above 0 per layer, (n_layers, by neuron)."""
    out = []
    hooks = [a.register_forward_hook(lambda m, args, post: out.append((post > 0).float())) for a in model.act]
    model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return out


def layers_and_tokens(maker, B=8, T=64):
    torch.manual_seed(0)
    return Layers(maker), torch.randint(200, (B, T))


def test_none_is_the_activation_itself():
    act = ReLU(d_ff=4)
    assert NoThreshold()(act, 4) is act


@pytest.mark.parametrize("scope", ["layer", "neuron", "model"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("act", ACTS)
def test_subtracts_c_in_front_of_any_activation(act, maker, scope, make_act):
    site = maker(init=-0.5, active_frac=None, scope=scope)(make_act(act, 8), 8)
    pre = torch.randn(2, 3, 8)
    assert torch.equal(site(pre), make_act(act, 8)(pre - -0.5))
    assert site.threshold.shape == ((8,) if scope == "neuron" else ())
    assert isinstance(site.threshold, nn.Parameter) == (maker is LearnedThreshold)
    assert "threshold" in site.state_dict()


@pytest.mark.parametrize("scope", ["layer", "neuron"])
def test_gradient_of_c_by_finite_differences(scope):
    site = LearnedThreshold(init=0.2, active_frac=None, scope=scope)(nn.SiLU(), 5).double()
    pre = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)

    def f(pre, c):
        return torch.func.functional_call(site, {"threshold": c}, (pre,))

    assert torch.autograd.gradcheck(f, (pre, site.threshold))


def test_gradient_of_c_is_minus_the_sum_over_what_shares_it():
    layer = LearnedThreshold(init=0.1, active_frac=None, scope="layer")(ReLU2(d_ff=6), 6)
    neuron = LearnedThreshold(init=0.1, active_frac=None, scope="neuron")(ReLU2(d_ff=6), 6)
    pre = torch.randn(50, 6)
    layer(pre).sum().backward()
    neuron(pre).sum().backward()
    expected = -2 * (pre - 0.1).clamp(min=0)
    torch.testing.assert_close(layer.threshold.grad, expected.sum())
    torch.testing.assert_close(neuron.threshold.grad, expected.sum(0))


def test_layers_do_not_share_c_unless_the_scope_is_model():
    for scope, n in (("layer", 3), ("neuron", 3), ("model", 1)):
        model = Layers(LearnedThreshold(init=0.0, active_frac=None, scope=scope))
        assert len({id(act.threshold) for act in model.act}) == n
        assert sum("threshold" in name for name, _ in model.named_parameters()) == n


def test_two_makers_do_not_share_the_c_of_a_model():
    a, b = (LearnedThreshold(init=0.0, active_frac=None, scope="model")(nn.ReLU(), 4) for _ in range(2))
    assert a.threshold is not b.threshold


@pytest.mark.parametrize("scope", ["layer", "neuron", "model"])
def test_keeps_bf16_under_autocast_with_c_in_fp32(scope):
    site, up = LearnedThreshold(init=0.1, active_frac=None, scope=scope)(ReLU2(d_ff=8), 8), nn.Linear(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        post = site(up(torch.randn(3, 4)))
    post.float().sum().backward()
    assert post.dtype == torch.bfloat16
    assert site.threshold.grad.dtype == torch.float32


def test_tells_whether_inactive_means_zero(make_act):
    maker = FixedThreshold(init=0.0, active_frac=None, scope="layer")
    assert maker(make_act("relu2", 4), 4).exact_zeros
    assert not maker(make_act("gelu", 4), 4).exact_zeros


@pytest.mark.parametrize("frac", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("maker", MAKERS)
def test_calibrate_by_layer(maker, frac):
    model, tokens = layers_and_tokens(maker(init=0.0, active_frac=frac, scope="layer"))
    calibrate(model, tokens)
    for active in active_fractions(model, tokens):
        assert active.mean().item() == pytest.approx(frac, abs=2e-3)
    assert len({act.threshold.item() for act in model.act}) == 3


@pytest.mark.parametrize("maker", MAKERS)
def test_calibrate_by_neuron(maker):
    model, tokens = layers_and_tokens(maker(init=0.0, active_frac=0.3, scope="neuron"))
    calibrate(model, tokens)
    for active in active_fractions(model, tokens):
        torch.testing.assert_close(
            active.mean((0, 1)), torch.full((active.shape[-1],), 0.3), atol=0.03, rtol=0
        )


@pytest.mark.parametrize("maker", MAKERS)
def test_calibrate_for_the_model(maker):
    model, tokens = layers_and_tokens(maker(init=0.0, active_frac=0.3, scope="model"))
    calibrate(model, tokens)
    pooled = torch.cat([active.flatten() for active in active_fractions(model, tokens)])
    assert pooled.mean().item() == pytest.approx(0.3, abs=2e-3)
    assert len({act.threshold.item() for act in model.act}) == 1


def test_c_for_30_percent_of_a_normal_is_its_quantile():
    site = FixedThreshold(init=0.0, active_frac=0.30, scope="layer")(ReLU2(d_ff=512), 512)
    site.place(0.5 * torch.randn(2048, 512))  # E27: sd 0.5 gives C = 0.5 * 0.5244 = 0.262
    assert site.threshold.item() == pytest.approx(0.262, abs=2e-3)
    site.active_frac = 0.70
    site.place(0.5 * torch.randn(2048, 512))  # E28
    assert site.threshold.item() == pytest.approx(-0.262, abs=2e-3)


NORMS = sorted(p.stem for p in (CONFIGS / "norm").glob("*.yaml"))
SMALL = [
    "model.n_layers=4",
    "model.d_model=64",
    "model.n_heads=2",
    "model.seq_len=64",
    "model.zero_out=false",
]


def gpt_and_tokens(*overrides):
    """An untrained GPT, the batch that C is placed on, and another one, 4096 tokens each."""
    cfg, _ = build.compose([*SMALL, *overrides])
    draws = torch.randint(500, (2, 64, 64), generator=torch.Generator().manual_seed(1))
    return build.model(cfg, 500), *draws


@torch.no_grad()
def active_by_layer(gpt, tokens):
    post = []
    hooks = [b.ffn.act.register_forward_hook(lambda m, args, out: post.append(out)) for b in gpt.blocks]
    gpt.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return [(out > 0).double().mean().item() for out in post]


@pytest.mark.parametrize(
    ("norm", "init"),
    [
        *((norm, SCHEMES[i % len(SCHEMES)]) for i, norm in enumerate(NORMS)),
        *(("rmsnorm", s) for s in SCHEMES),
    ],
)
def test_active_frac_is_met_for_every_norm_and_init(norm, init):
    """Where C is placed, to the pair; on other tokens within what a layer of 256 neurons and 4096 tokens
    that share a vocabulary of 500 spreads. Nothing is assumed of the distribution.
    """
    parts = ["arch=speedrun", f"norm={norm}", f"model.init={init}"]
    gpt, placed, other = gpt_and_tokens(*parts, "threshold=fixed", "threshold.active_frac=0.3")
    for frac in (0.3, 0.7):
        for block in gpt.blocks:
            block.ffn.act.active_frac = frac
        calibrate(gpt, placed)
        assert active_by_layer(gpt, placed) == pytest.approx([frac] * 4, abs=1e-3)
        assert active_by_layer(gpt, other) == pytest.approx([frac] * 4, abs=0.02)


def test_c_and_active_frac_of_the_source_in_the_speedrun_arch():
    """E27: entries of sd 0.5/sqrt(D) on a normed stream give pre-activations of sd 0.5: C = +-0.262 for 30
    and 70 %, and 15.9 % above +0.5.
    """
    for frac, c in ((0.3, 0.262), (0.7, -0.262)):
        gpt, tokens, _ = gpt_and_tokens("arch=speedrun", "threshold=fixed", f"threshold.active_frac={frac}")
        calibrate(gpt, tokens)
        assert [b.ffn.act.threshold.item() for b in gpt.blocks] == pytest.approx([c] * 4, abs=0.02)
    gpt, tokens, _ = gpt_and_tokens("arch=speedrun", "threshold=fixed", "threshold.init=0.5")
    assert active_by_layer(gpt, tokens) == pytest.approx([0.159] * 4, abs=0.01)


def test_calibrate_leaves_everything_else_as_it_was():
    model, tokens = layers_and_tokens(LearnedThreshold(init=0.0, active_frac=0.3, scope="layer"))
    model.train()
    model.dropout.eval()
    before = {name: p.clone() for name, p in model.named_parameters() if "threshold" not in name}
    rng = torch.get_rng_state()
    calibrate(model, tokens)
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training
    assert model.act.training
    assert not model.dropout.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    assert not any(act._forward_pre_hooks for act in model.act)
    assert all(act.threshold.requires_grad and act.threshold.grad_fn is None for act in model.act)


def test_calibrate_removes_its_hooks_when_the_model_fails():
    model, _ = layers_and_tokens(FixedThreshold(init=0.0, active_frac=0.3, scope="layer"))
    with pytest.raises(IndexError):
        calibrate(model, torch.full((1, 4), 999))
    assert not any(act._forward_pre_hooks for act in model.act)
    assert model.training


@pytest.mark.parametrize("maker", [NoThreshold(), FixedThreshold(init=0.4, active_frac=None, scope="layer")])
def test_calibrate_without_a_target_does_not_even_run_the_model(maker):
    model, tokens = layers_and_tokens(maker)
    model.forward = None
    calibrate(model, tokens)
    assert all(getattr(act, "threshold", torch.tensor(0.4)).item() == pytest.approx(0.4) for act in model.act)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"init": float("nan")}, "threshold.init"),
        ({"active_frac": 1.5}, "threshold.active_frac"),
        ({"active_frac": 0.0}, "threshold.active_frac"),
        ({"active_frac": 0.3, "init": 0.5}, "both"),
    ],
)
def test_impossible_numbers_are_named(maker, options, named):
    with pytest.raises(UserError, match=named):
        maker(**{"init": 0.0, "active_frac": None, "scope": "layer", **options})


def test_all_impossible_numbers_are_named_at_once():
    with pytest.raises(UserError) as error:
        LearnedThreshold(init=float("inf"), active_frac=2.0, scope="layer")
    assert len(error.value.problems) == 3
