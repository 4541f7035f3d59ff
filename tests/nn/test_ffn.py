import itertools
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ffnlab import build
from ffnlab.config import compose, settings
from ffnlab.nn.ffn.base import FFN
from ffnlab.nn.gpt import ModelSettings
from ffnlab.nn.norm import RMSNorm
from ffnlab.nn.threshold import FixedThreshold, LearnedThreshold

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(p.stem for p in (CONFIGS / "ffn").glob("*.yaml") if p.stem != "none")
ACTS = sorted(p.stem for p in (CONFIGS / "act").glob("*.yaml"))
ALL = frozenset({"gate", "up", "down"})
GATES = ("mlp", "swiglu")


def linear(m, x):
    """x W^T + b, with the weights as matrices."""
    return torch.einsum("...i,oi->...o", x, m.weight) + (0 if m.bias is None else m.bias)


def gated(ffn, x, act):
    return linear(ffn.down, act(linear(ffn.gate, x)) * linear(ffn.up, x))


def relu2(a):
    return a.clamp(min=0) ** 2


def mlp(ffn, x):
    return linear(ffn.down, relu2(linear(ffn.up, x)))


def opposite(ffn, x):
    """Pre-activations of neurons in pairs: V x and -(V x)."""
    pre = linear(ffn.up, x)
    return torch.cat([pre, -pre], dim=-1)


def dual_path(ffn, x):
    plus, minus = relu2(opposite(ffn, x)).chunk(2, dim=-1)
    return linear(ffn.down.plus, plus) + minus @ ffn.down.minus.weight.T


def low_rank(ffn, x):
    up = ffn.up.out.weight @ ffn.up.into.weight
    down = ffn.down.out.weight @ ffn.down.into.weight
    biases = [0 if m.out.bias is None else m.out.bias for m in (ffn.up, ffn.down)]
    return relu2(x @ up.T + biases[0]) @ down.T + biases[1]


def moe(ffn, x):
    """Every expert on every token, weighted by its share among the two largest probabilities, else by 0."""
    p = (x @ ffn.router.weight.T).softmax(-1)
    second = p.sort(-1, descending=True).values[..., 1:2]
    gates = torch.where(p >= second, p, 0)
    gates = gates / gates.sum(-1, keepdim=True)
    return sum(gates[..., e : e + 1] * mlp(expert, x) for e, expert in enumerate(ffn.experts))


def switch(ffn, x):
    """Token by token: the likeliest expert, while it has places left in the sequence."""
    p = (x @ ffn.router.weight.T).softmax(-1)
    y = torch.zeros_like(x)
    for b, sequence in enumerate(x):
        places = [math.ceil(1.25 * 8 / 8)] * 8  # context (of make_ffn) and experts: 8
        for t, token in enumerate(sequence):
            gate, e = p[b, t].max(-1)
            if places[e] > 0:
                y[b, t] = gate * mlp(ffn.experts[e], token)
                places[e] -= 1
    return y


def dynamic(ffn, x):
    F = ffn.d_ff
    share = linear(ffn.width.controller, x).sigmoid()
    mask = ((share * F - torch.arange(F) - 0.5) / (0.05 * F)).sigmoid()
    return linear(ffn.down, relu2(linear(ffn.up, x)) * mask)


# Written out by hand, with the activation that the variant brings; a variant without a line here fails.
FORMULAS = {
    "mlp": ("relu2", mlp),
    "glu": ("sigmoid", lambda ffn, x: gated(ffn, x, lambda a: 1 / (1 + torch.exp(-a)))),
    "bilinear": ("identity", lambda ffn, x: gated(ffn, x, lambda a: a)),
    "reglu": ("relu", lambda ffn, x: gated(ffn, x, lambda a: a.clamp(min=0))),
    "reglu2": ("relu2", lambda ffn, x: gated(ffn, x, relu2)),
    "geglu": ("gelu", lambda ffn, x: gated(ffn, x, lambda a: a / 2 * (1 + torch.erf(a / 2**0.5)))),
    "swiglu": ("silu", lambda ffn, x: gated(ffn, x, lambda a: a / (1 + torch.exp(-a)))),
    "tied_reglu": ("relu", mlp),  # E43
    "paired": ("relu2", lambda ffn, x: linear(ffn.down, relu2(opposite(ffn, x)))),
    "paired_init": ("relu2", mlp),
    "dual_path": ("relu2", dual_path),
    "low_rank": ("relu2", low_rank),
    "multi": ("relu2", lambda ffn, x: sum(mlp(part, x) for part in ffn.parts)),
    "moe": ("relu2", moe),
    "switch": ("relu2", switch),
    "dynamic": ("relu2", dynamic),
}
# What `act` of an FFN sees, where that is not what `gate` or `up` puts out.
PRE = {"paired": opposite, "dual_path": opposite}


# Every variant with its own activation, and every activation in an FFN without and with a gate.
CASES = sorted({(name, act) for name, (act, _) in FORMULAS.items()} | set(itertools.product(GATES, ACTS)))


def leaves(ffn):
    """The FFNs that a variant is made of: itself, or its parts."""
    return [module for module in ffn.modules() if isinstance(module, FFN)]


@pytest.mark.parametrize("bias", [frozenset(), ALL, frozenset({"up"})], ids=["plain", "all", "up"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_its_formula(name, bias, make_ffn):
    assert name in FORMULAS, f"write the formula of ffn={name} into FORMULAS"
    act, formula = FORMULAS[name]
    ffn = make_ffn(name, act, bias=bias).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(ffn(x), formula(ffn, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "act"), CASES)
def test_shape_and_a_gradient_for_every_parameter(name, act, make_ffn, make_act):
    scope = "neuron" if make_act(act, 1).shift_invariant else "layer"  # one C for all would do nothing
    ffn = make_ffn(name, act, bias=ALL, wrap=LearnedThreshold(init=0.1, active_frac=None, scope=scope))
    x = torch.randn(2, 50, 16, requires_grad=True)
    y = ffn(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    silent = [n for n, p in ffn.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "act"), CASES)
def test_stress_input_stays_finite(name, act, dtype, make_ffn):
    ffn = make_ffn(name, act).to(dtype)  # E83
    x = (torch.randn(1000, 16) * 10).to(dtype).requires_grad_()
    y = ffn(x)
    y.sum().backward()
    assert y.dtype == dtype
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ffn.parameters())


# Experts take long; the formulas of the others are those of swiglu, mlp or paired with another activation.
SLOW_DERIVATIVES = {"moe", "switch", "bilinear", "geglu", "glu", "reglu", "reglu2", "paired_init", "multi"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW_DERIVATIVES else n for n in NAMES]
)
def test_derivatives_by_finite_differences(name, make_ffn):
    act, _ = FORMULAS[name]
    ffn = make_ffn(name, act, d_model=4, d_ff=6, bias=ALL).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    names = list(dict(ffn.named_parameters()))

    def f(x, *parameters):
        return torch.func.functional_call(ffn, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *ffn.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trips(name, make_ffn):
    wrap = LearnedThreshold(init=0.3, active_frac=None, scope="neuron")
    old, new = make_ffn(name, bias=ALL, wrap=wrap), make_ffn(name, bias=ALL, wrap=wrap)
    for p in old.parameters():
        torch.nn.init.normal_(p)
    new.load_state_dict(old.state_dict())
    x = torch.randn(4, 16)
    assert torch.equal(old(x), new(x))


@pytest.mark.parametrize("name", NAMES)
def test_up_act_down_are_the_contract(name, make_ffn):
    """Probes, kernels and optimizer groups find pre-activations, neurons and matrices by these names."""
    ffn = make_ffn(name, "relu2", bias=frozenset({"down"}))
    assert leaves(ffn)
    for leaf in leaves(ffn):
        children = dict(leaf.named_children())
        assert {"up", "act", "down"} <= children.keys()
        vectors = [n for n, p in leaf.named_parameters() if p.dim() == 1 and "controller" not in n]
        assert len(vectors) == 1
        assert re.fullmatch(r"down\.(\w+\.)?bias", vectors[0])
        seen = {}
        leaf.act.register_forward_hook(
            lambda module, args, out, seen=seen: seen.update(pre=args[0], post=out)
        )
        x = torch.randn(2, 3, 16)
        y = leaf(x)
        pre = PRE.get(name, lambda leaf, x: (leaf.gate if hasattr(leaf, "gate") else leaf.up)(x))(leaf, x)
        assert torch.equal(seen["pre"], pre)
        assert seen["post"].shape == (2, 3, leaf.d_ff)
        assert torch.equal(y, leaf.down(leaf.hidden(x)))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_falls_on_the_neurons_and_only_in_training(name, make_ffn):
    ffn, bare = make_ffn(name, dropout=0.5), make_ffn(name)
    x = torch.randn(20, 16)
    assert torch.equal(ffn.eval()(x), bare.eval()(x))
    for leaf, whole in zip(leaves(ffn.train()), leaves(bare.train()), strict=True):
        seen = []
        leaf.down.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        leaf(x)
        kept = seen[0] != 0
        torch.testing.assert_close(seen[0][kept], 2 * whole.hidden(x)[kept])
        possible = whole.hidden(x) != 0
        assert (seen[0] != 0).sum() / possible.sum() == pytest.approx(0.5, abs=0.2)


def test_relu2_is_reglu_with_tied_gate(make_ffn):
    mlp, reglu = make_ffn("mlp", "relu2", bias=ALL), make_ffn("reglu", "relu", bias=ALL)  # E43
    reglu.up.load_state_dict(mlp.up.state_dict())
    reglu.gate.load_state_dict(mlp.up.state_dict())
    reglu.down.load_state_dict(mlp.down.state_dict())
    x = torch.randn(100, 16)
    torch.testing.assert_close(mlp(x), reglu(x))


def test_threshold_is_a_shared_hidden_bias(make_ffn):
    c = 0.37  # E44: one bias -c on the d_ff hidden units
    with_c = make_ffn("mlp", "relu2", wrap=FixedThreshold(init=c, active_frac=None, scope="layer"))
    with_bias = make_ffn("mlp", "relu2", bias=frozenset({"up"}))
    with_bias.load_state_dict({**with_c.state_dict(), "up.bias": torch.full((24,), -c)}, strict=False)
    x = torch.randn(100, 16)
    torch.testing.assert_close(with_c(x), with_bias(x))


@pytest.mark.parametrize("name", NAMES)
def test_scale_of_the_input_is_lost_in_a_parameter_free_norm(name, make_ffn):
    norm, ffn = RMSNorm(16, gain=False, eps=0.0), make_ffn(name)  # E45
    x = torch.randn(50, 16)
    for a in (1e-3, 0.5, 7.0, 1e4):
        torch.testing.assert_close(ffn(norm(a * x)), ffn(norm(x)))


def test_half_of_the_neurons_are_active_at_the_start(make_ffn):
    ffn, norm = make_ffn("mlp", "relu2", d_model=128, d_ff=512), RMSNorm(128, gain=False, eps=1e-6)  # E46
    active = ffn.hidden(norm(torch.randn(4096, 128))) > 0
    assert active.float().mean().item() == pytest.approx(0.5, abs=0.005)
    by_neuron = active.float().mean(0)  # 4096 draws: sd 0.0078
    assert (by_neuron - 0.5).abs().max() < 5 * 0.0078


@pytest.mark.parametrize("act", ["relu", "relu2"])
def test_a_neuron_that_is_never_active_gets_no_gradient(act, make_ffn):
    ffn = make_ffn("mlp", act, bias=ALL)  # E47
    with torch.no_grad():
        ffn.up.bias[:6] = -100
        ffn.up.bias[6:] = 1
    x = torch.randn(200, 16)
    ffn(x).square().sum().backward()
    dead = (ffn.hidden(x) > 0).sum(0) == 0
    assert dead.tolist() == [True] * 6 + [False] * 18
    assert (ffn.up.weight.grad[dead] == 0).all()
    assert (ffn.up.bias.grad[dead] == 0).all()
    assert (ffn.down.weight.grad[:, dead] == 0).all()
    assert (ffn.up.weight.grad[~dead] != 0).any(dim=1).all()


def test_identity_collapses_to_one_linear_map(make_ffn):
    ffn = make_ffn("mlp", "identity").double()  # E66
    x = torch.randn(10, 16, dtype=torch.float64)
    torch.testing.assert_close(ffn(x), F.linear(x, ffn.down.weight @ ffn.up.weight))


@pytest.mark.parametrize(("act", "collapses"), [("identity", True), ("relu", False), ("gelu", False)])
def test_stacked_linear_layers_collapse_to_one(act, collapses, make_ffn):
    """E66: a residual stack without activations is the product of its (I + down up); with one it is not."""
    stack = [make_ffn("mlp", act).double() for _ in range(5)]
    for ffn in stack:
        torch.nn.init.normal_(ffn.up.weight, std=0.3)
        torch.nn.init.normal_(ffn.down.weight, std=0.3)
    x = y = torch.randn(20, 16, dtype=torch.float64)
    product = torch.eye(16, dtype=torch.float64)
    for ffn in stack:
        y = y + ffn(y)
        product = (torch.eye(16, dtype=torch.float64) + ffn.down.weight @ ffn.up.weight) @ product
    assert torch.allclose(y, x @ product.T) == collapses


def test_two_layers_by_hand(make_ffn):
    """E98: x = (1, 2, -1) gives h = (0, 0.3) and y = -0.3, here the first of the three outputs."""
    ffn = make_ffn("mlp", "relu", d_model=3, d_ff=2, bias=ALL)
    with torch.no_grad():
        ffn.up.weight.copy_(torch.tensor([[0.5, -0.5, 1.0], [1.0, 0.0, 0.5]]))
        ffn.up.bias.copy_(torch.tensor([0.1, -0.2]))
        ffn.down.weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]))
        ffn.down.bias.zero_()
    x = torch.tensor([1.0, 2.0, -1.0])
    torch.testing.assert_close(ffn.hidden(x), torch.tensor([0.0, 0.3]))
    torch.testing.assert_close(ffn(x), torch.tensor([-0.3, 0.0, 0.0]))


def mlp_forward(x, weights, biases):
    """E99, in NumPy: ReLU between the layers of a chain, none after the last."""
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        x = np.maximum(0, w @ x + b)
    return weights[-1] @ x + biases[-1]


def test_numpy_forward(make_ffn):
    """E99: sizes 3-4-2-1 give the shape (1,); with one hidden layer it is ffn=mlp act=relu on one token."""
    rng = np.random.default_rng(0)
    sizes = [(4, 3), (2, 4), (1, 2)]
    chain = mlp_forward(
        rng.normal(size=3), [rng.normal(size=s) for s in sizes], [np.zeros(s[0]) for s in sizes]
    )
    assert chain.shape == (1,)
    ffn = make_ffn("mlp", "relu", bias=ALL).double()
    weights, biases = zip(
        *((m.weight.detach().numpy(), m.bias.detach().numpy()) for m in (ffn.up, ffn.down)), strict=True
    )
    x = rng.normal(size=16)
    np.testing.assert_allclose(
        ffn(torch.tensor(x)).detach().numpy(), mlp_forward(x, weights, biases), rtol=1e-12
    )


def test_a_threshold_that_cannot_matter_is_said():
    cfg, _ = compose(["act=quantile", "threshold=learned"])
    with pytest.warns(UserWarning, match="ignores a threshold"):
        build.ffn_maker(cfg, settings(ModelSettings, cfg["model"], "model"))(0)
    for quiet in (["act=quantile"], ["act=quantile", "threshold=learned", "threshold.scope=neuron"]):
        cfg, _ = compose(quiet)
        build.ffn_maker(cfg, settings(ModelSettings, cfg["model"], "model"))(0)


BRINGS = {"glu": "Sigmoid", "bilinear": "Identity", "reglu": "ReLU", "geglu": "GELU", "swiglu": "SiLU"}
BRINGS |= {"reglu2": "ReLU2", "tied_reglu": "ReLU"}


@pytest.mark.parametrize(
    ("overrides", "act"),
    [
        pytest.param([f"ffn={ffn}"], act, marks=[] if ffn in ("bilinear", "reglu2") else [pytest.mark.slow])
        for ffn, act in BRINGS.items()
    ]
    + [
        ([], "ReLU2"),
        (["ffn=swiglu", "act=relu2"], "ReLU2"),
        pytest.param(["act=relu2", "ffn=swiglu"], "ReLU2", marks=pytest.mark.slow),
        (["arch=nanogpt"], "GELU"),
        pytest.param(["arch=nanogpt", "ffn=swiglu"], "SiLU", marks=pytest.mark.slow),
        (["arch=nanogpt", "ffn=swiglu", "act=leaky_relu"], "LeakyReLU"),
        (["arch=nanogpt", "act=relu2"], "ReLU2"),
        pytest.param(["arch=nanogpt", "ffn=reglu2"], "ReLU2", marks=pytest.mark.slow),
        (["arch=nanogpt", "ffn=paired"], "GELU"),
        pytest.param(["arch=original"], "ReLU", marks=pytest.mark.slow),
        pytest.param(["arch=llama", "ffn=geglu"], "GELU", marks=pytest.mark.slow),
        (["arch=speedrun", "ffn=mlp"], "ReLU2"),
    ],
)
def test_which_activation_a_command_line_gives(overrides, act):
    cfg, _ = compose(overrides)
    assert cfg["act"]["_target_"].rpartition(".")[2] == act


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    """In a process of its own, because the shape checks that tests switch on cannot be traced."""
    code = """
        import torch
        from torch import nn
        from ffnlab.nn.act.relu import ReLU2
        from ffnlab.nn.ffn.mlp import MLP
        from ffnlab.nn.norm import RMSNorm
        from ffnlab.nn.threshold import LearnedThreshold

        wrap = LearnedThreshold(init=0.1, active_frac=None, scope="layer")
        ffn = MLP(
            d_model=16, d_ff=64, make_act=lambda F: wrap(ReLU2(d_ff=F), F), bias=frozenset(), dropout=0.0
        )
        model = nn.Sequential(RMSNorm(16, gain=True, eps=1e-6), ffn)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for enabled in (False, True):
            x, results = torch.randn(4, 16), []
            for f in (model, compiled):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    y = f(x)
                y.float().square().sum().backward()
                results.append([y, *(p.grad for p in model.parameters())])
            torch.testing.assert_close(*results, rtol=1e-2 if enabled else 1e-5, atol=1e-4)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
