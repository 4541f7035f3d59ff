"""Roles, groups, Muon against PyTorch's own, schedules against closed forms."""

import math

import pytest
import torch

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.optim import ROLES, BatchedMuon, decays, role_of
from ffnlab.schedule import Constant, Cosine, Trapezoid

TINY = ["model.n_layers=6", "model.d_model=32", "model.n_heads=2", "model.seq_len=24"]
FULL = [
    *TINY, "arch=record42", "model=nano", "model.drop_attn=[0]", "model.value_embeddings=[[1,4],[2]]",
    "skip=unet", "norm=layernorm", "residual.scale=learned", "threshold=learned", "ffn=swiglu",
    "ffn.bias=true", "attention.bias=true",
]  # fmt: skip


def make(*overrides: str):
    cfg, _ = build.compose(list(overrides))
    model = build.model(cfg, 97)
    return model, build.optimizer(cfg, model)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("embed.weight", "embedding"),
        ("parts.position.table.weight", "embedding"),
        ("parts.value_embeddings.tables.0.weight", "embedding"),
        ("parts.skip.gate_01_04", "gate"),
        ("parts.x0_lambdas.lambdas", "gate"),
        ("parts.smear.w", "gate"),
        ("blocks.0.attn.q.weight", "attention"),
        ("blocks.0.attn.value_lambdas", "gate"),
        ("blocks.0.attn.gate_w", "gate"),
        ("blocks.0.ffn.up.bias", "ffn"),
        ("blocks.0.ffn.act.threshold", "threshold"),
        ("blocks.0.ffn.act.slope", "threshold"),
        ("blocks.0.ffn.act.act.scale", "threshold"),  # star_relu's, behind a threshold C
        ("blocks.0.ffn.act.norm.weight", "norm"),
        ("parts.skip.join_01_04.weight", "ffn"),
        ("blocks.0.residual.attn.norm.weight", "norm"),
        ("blocks.0.residual.attn.scale", "gate"),
        ("blocks.0.residual.ffn.carry", "gate"),
        ("blocks.0.residual.ffn.norm_out.bias", "norm"),
        ("norm.weight", "norm"),
        ("head.weight", "head"),
    ],
)
def test_role_by_name(name: str, role: str):
    assert role_of(name) == role


@pytest.mark.parametrize("optim", ["muon", "adamw", "sgd"])
def test_every_parameter_in_one_group_with_its_rate_and_decay(optim: str):
    model, optimizer = make(*FULL, f"optim={optim}", "optim.weight_decay=0.3", "optim.lr_scale.threshold=7")
    optimizer.set_factor(0.5)
    names = {id(p): n for n, p in model.named_parameters()}
    seen = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            seen.append(name)
            assert group["role"] == role_of(name)
            assert group["lr"] == pytest.approx(optimizer.lr * optimizer.lr_scale[role_of(name)] * 0.5)
            assert group["weight_decay"] == (0.3 if decays(name, p) else 0.0)
    assert sorted(seen) == sorted(names.values())
    assert {role_of(n) for n in seen} == set(ROLES)
    spared = ("norm", "scale", "threshold", "gate_0", "lambdas", "bias", "gate_w", "parts.smear", "backout")
    assert not any(decays(n, p) for n, p in model.named_parameters() if any(part in n for part in spared))


@pytest.mark.parametrize("optim", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("act", ["prelu", "swish", "star_relu", "xielu"])
def test_what_an_activation_learns_goes_with_the_threshold_and_never_decays(act: str, optim: str):
    options = ["optim.weight_decay=0.5", "optim.lr_scale.threshold=3", "threshold=learned"]
    model, optimizer = make(*TINY, f"act={act}", f"optim={optim}", *options)
    learned = {n: p for n, p in model.named_parameters() if ".act." in n}
    assert len(learned) == 6 * (1 + (2 if act in {"star_relu", "xielu"} else 1))  # per layer, and its C
    groups = [group for group in optimizer.param_groups if group["role"] == "threshold"]
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in learned.values()}
    assert all((group["lr"], group["weight_decay"]) == (3 * optimizer.lr, 0.0) for group in groups)


def test_muon_takes_the_matrices_of_attention_and_ffn_only():
    model, optimizer = make(*FULL)
    muon = {id(p) for group in optimizer.optimizers[0].param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in muon) == (p.ndim == 2 and role_of(name) in ("ffn", "attention")), name


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24)])
def test_batched_muon_equals_torch_muon(shape: tuple[int, int], nesterov: bool):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for _ in range(3)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    a, b = BatchedMuon([{"params": ours}], torch.bfloat16, **options), torch.optim.Muon(theirs, **options)
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(shape)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=4e-3, rtol=0)  # updates of size 0.05 in bf16, four of them
        torch.testing.assert_close(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


def test_lr_scale_must_name_every_role():
    cfg, _ = build.compose([*TINY, "~optim.lr_scale.gate"])
    with pytest.raises(UserError, match="threshold, gate, norm"):
        build.optimizer(cfg, build.model(cfg, 97))


@pytest.mark.parametrize("optim", ["muon", "adamw", "sgd"])
def test_state_round_trips_by_name(optim: str):
    model, optimizer = make(*TINY, f"optim={optim}")
    x = torch.randint(0, 97, (2, 24))
    for _ in range(2):
        model.loss(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    other, restored = make(*TINY, f"optim={optim}")
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, restored)):
        m.loss(x, x).backward()
        o.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_trapezoid_closed_form():
    schedule = Trapezoid(steps=100, warmup_frac=0.1, decay_frac=0.4, floor=0.2)
    assert [schedule(k) for k in (1, 9, 10, 11, 60, 61)] == pytest.approx([0.1, 0.9, 1, 1, 1, 1])
    assert schedule(62) == pytest.approx(0.2 + 0.8 * 39 / 40)
    assert schedule(100) == pytest.approx(0.2 + 0.8 / 40)


def test_cosine_closed_form():
    schedule = Cosine(steps=100, warmup_frac=0.2, floor=0.1)
    assert [schedule(k) for k in (1, 19, 20, 21)] == pytest.approx([0.05, 0.95, 1, 1])
    assert schedule(61) == pytest.approx(0.55)
    assert schedule(100) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 79 / 80)))


def test_constant_closed_form_does_not_see_the_horizon():
    a, b = Constant(steps=100, warmup_frac=0.0), Constant(steps=900, warmup_frac=0.0)
    assert [a(k) for k in (1, 50, 100)] == [b(k) for k in (1, 50, 100)] == [1, 1, 1]
