"""Experts against Hugging Face's Mixtral and Switch blocks, and what no other library states."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
    router_z_loss_func,
)
from transformers.models.switch_transformers.modeling_switch_transformers import (
    load_balancing_loss_func as switch_loss,
)

from ffnlab import build
from ffnlab.errors import UserError
from ffnlab.nn.count import count
from ffnlab.nn.ffn.moe import MoE, imbalance, within_capacity
from ffnlab.nn.ffn.switch import Switch
from ffnlab.optim import role_of

D, FF, E = 16, 24, 4
TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=16"]
OPTIONS = {
    "d_model": D,
    "d_ff": FF,
    "bias": frozenset(),
    "dropout": 0.0,
    "seq_len": 20,
    "n_experts": E,
    "balance": 1.0,
    "z_loss": 0.0,
    "matched": "active",
}


def make_moe(make_act, act="silu", **options) -> MoE:
    torch.manual_seed(0)
    mine = {"top_k": 2, "gated": True, "renormalise": True, "capacity_factor": None, **options}
    return MoE(make_act=lambda width: make_act(act, width), **{**OPTIONS, **mine})


def make(*overrides: str):
    cfg, _ = build.compose([*TINY, *overrides])
    return build.model(cfg, 97)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equals_mixtral(top_k, make_act):
    """Output, gradient of the input, and (times k) the load-balancing loss."""
    config = MixtralConfig(
        hidden_size=D, intermediate_size=FF, num_local_experts=E, num_experts_per_tok=top_k
    )
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config)
    ours = make_moe(make_act, top_k=top_k)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        ours.router.weight.copy_(theirs.gate.weight)
        for e, expert in enumerate(ours.experts):
            gate, up = theirs.experts.gate_up_proj[e].chunk(2)
            expert.gate.weight.copy_(gate)
            expert.up.weight.copy_(up)
            expert.down.weight.copy_(theirs.experts.down_proj[e])
    x, z = torch.randn(3, 10, D, requires_grad=True), None
    z = x.detach().clone().requires_grad_()
    y, expected = ours(x), theirs(z)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, atol=1e-5, rtol=1e-4)
    logits = theirs.gate(z)[0]
    torch.testing.assert_close(top_k * ours.penalty, load_balancing_loss_func((logits,), E, top_k))


@pytest.mark.parametrize("capacity", [1, 3, 20])
def test_equals_switch_transformers(capacity, make_act):
    """Output with full experts and dropped tokens, gradient of the router, both losses."""
    config = SwitchTransformersConfig(
        d_model=D, hidden_size=D, d_ff=FF, num_experts=E, expert_capacity=capacity, router_jitter_noise=0.0,
        dropout_rate=0.0, dense_act_fn="relu",
    )  # fmt: skip
    theirs = SwitchTransformersSparseMLP(config)
    torch.manual_seed(1)
    ours = Switch(
        make_act=lambda width: make_act("relu", width),
        gated=False,
        capacity_factor=capacity * E / 20,
        **OPTIONS,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
        ours.router.weight.copy_(theirs.router.classifier.weight)
        for e, expert in enumerate(ours.experts):
            expert.up.weight.copy_(theirs.experts[f"expert_{e}"].wi.weight)
            expert.down.weight.copy_(theirs.experts[f"expert_{e}"].wo.weight)
    x = torch.randn(3, 20, D)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected)
    dropped = (expected == 0).all(-1)
    assert dropped.any() == (capacity < 20)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        ours.router.weight.grad, theirs.router.classifier.weight.grad, atol=1e-5, rtol=1e-4
    )
    _, _, logits = theirs.router(x)
    everyone = logits.flatten(0, 1).unsqueeze(0)  # their mean is over groups, ours over all tokens
    torch.testing.assert_close(
        ours.penalty, switch_loss(everyone.softmax(-1), everyone.argmax(-1)), atol=1e-5, rtol=1e-5
    )
    z = make_moe(make_act, balance=0.0, z_loss=1.0)
    z.router.weight.data.copy_(ours.router.weight)
    z(x)
    torch.testing.assert_close(z.penalty, router_z_loss_func(logits))


def test_the_balancing_loss_is_1_when_balanced_and_e_when_one_expert_has_all():
    even = torch.full((8, 4), 0.25)
    assert imbalance(even, torch.arange(8).view(8, 1) % 4) == pytest.approx(1.0)
    one = F.one_hot(torch.zeros(8, dtype=torch.long), 4).float()
    assert imbalance(one, torch.zeros(8, 1, dtype=torch.long)) == pytest.approx(4.0)


@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (2, 1.0), (2, 0.5), (3, 1.25)])
def test_capacity_takes_the_earlier_positions_of_each_sequence(k, factor):
    chosen = torch.rand(6 * 12, E).topk(k).indices
    places = math.ceil(factor * 12 * k / E)
    got = within_capacity(chosen, 12, E, places).view(6, 12, k)
    for sequence, kept in zip(chosen.view(6, 12, k), got, strict=True):
        left = [places] * E
        for token, marks in zip(sequence.tolist(), kept.tolist(), strict=True):
            for e, mark in zip(token, marks, strict=True):
                assert mark == (left[e] > 0)
                left[e] -= 1


@pytest.mark.parametrize("ffn", ["moe", "moe ffn.capacity_factor=0.5", "switch"])
def test_no_token_is_routed_by_a_later_one(ffn):
    gpt = make(*f"ffn={ffn}".split(), "model.zero_out=false").eval()
    x = torch.randint(0, 97, (1, 16), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, 9] = (other[0, 9] + 1) % 97
    torch.testing.assert_close(gpt(x)[:, :9], gpt(other)[:, :9])


@pytest.mark.parametrize("ffn", ["moe ffn.capacity_factor=0.5", "switch"])
def test_a_token_is_routed_alike_in_a_short_text_and_in_a_long_one(ffn):
    """A short text has the places of a whole context; with those of its own length the first tokens of a
    sample would be dropped that training never drops.
    """
    gpt = make(*f"ffn={ffn}".split(), "model.zero_out=false").eval()
    x = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(0))
    whole = gpt(x)
    for length in (1, 2, 7):
        torch.testing.assert_close(gpt(x[:, :length]), whole[:, :length])


def test_a_sequence_is_routed_alike_in_every_batch(make_act):
    switch = make_moe(make_act, top_k=1, capacity_factor=1.0)
    x = torch.randn(5, 12, D)
    torch.testing.assert_close(switch(x)[3:4], switch(x[3:4]))


def test_one_expert_is_the_plain_mlp(make_act, make_ffn):
    one = make_moe(make_act, act="relu2", n_experts=1, top_k=1, gated=False)
    mlp = make_ffn("mlp")
    mlp.load_state_dict(one.experts[0].state_dict())
    x = torch.randn(4, 7, D)
    torch.testing.assert_close(one(x), mlp(x))
    assert one.penalty.item() == pytest.approx(1.0)


def test_experts_start_apart_and_are_matrices_for_muon():
    gpt = make("ffn=moe", "optim=muon")
    experts = gpt.blocks[1]["ffn"].experts
    assert not torch.equal(experts[0].up.weight, experts[1].up.weight)
    muon, adamw = build.optimizer(build.compose([])[0], gpt).optimizers
    in_muon, in_adamw = ({id(p) for g in o.param_groups for p in g["params"]} for o in (muon, adamw))
    assert {id(p) for expert in experts for p in expert.parameters()} <= in_muon
    assert id(gpt.blocks[1]["ffn"].router.weight) in in_adamw
    assert role_of("blocks.1.ffn.router.weight") == "gate"


def test_active_parameters_are_those_that_a_token_meets():
    cost = count(make("ffn=moe", "ffn.n_experts=8", "ffn.top_k=2"), 16)["ffn"]
    dense = count(make("ffn=mlp"), 16)["ffn"]
    router = 4 * 32 * 8
    assert cost.active_parameters == router + (cost.parameters - router) // 4
    assert cost.active_parameters == pytest.approx(dense.parameters, rel=0.02)
    assert dense.active_parameters == dense.parameters
    total = count(make("ffn=moe", "ffn.matched=total", "model.d_model=128"), 16)["ffn"]
    assert total.parameters == pytest.approx(4 * 8 * 128 * 128, rel=0.01)


def test_few_tokens_leave_experts_without_any(make_act):
    moe = make_moe(make_act)
    y = moe(torch.randn(1, 1, D))
    y.sum().backward()
    assert all(p.grad is not None for p in moe.parameters())  # zeros: a distributed run needs one for each
    assert sum(bool(expert.up.weight.grad.any()) for expert in moe.experts) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ffn=moe", "ffn.top_k=9"], "ffn.top_k=9: expected a number from 1 to ffn.n_experts=8"),
        (["ffn=moe", "ffn.capacity_factor=0"], "ffn.capacity_factor=0"),
        (["ffn=dynamic", "ffn.target=0"], "ffn.target=0"),
        (["ffn=dynamic", "ffn.temperature=0", "ffn.budget=-1"], "ffn.budget=-1"),
    ],
)
def test_wrong_numbers_are_told(overrides, message):
    with pytest.raises(UserError, match=message):
        make(*overrides)


@pytest.mark.parametrize("bias", [frozenset(), frozenset({"up", "gate", "down"})])
@pytest.mark.parametrize("gated", [False, True])
def test_half_precision_experts_equal_plain_products(gated, bias, make_act):
    """What fills the rows up is not seen: values, all gradients and the L1 penalty against one dense pass per
    expert over all tokens, in the same precision.
    """
    moe = make_moe(make_act, gated=gated, bias=bias, act="relu2", balance=0.0)
    for expert in moe.experts:
        expert.l1 = torch.tensor(0.1)
    x = torch.randn(3, 50, D)

    def by_hand(x):
        tokens = x.flatten(0, 1)
        gates, chosen = moe.router(tokens).softmax(-1).topk(2, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        weight = torch.zeros(len(tokens), E).scatter(1, chosen, gates)
        y, l1 = 0.0, 0.0
        for e, expert in enumerate(moe.experts):
            hidden = expert.hidden(tokens)
            y = y + weight[:, e : e + 1] * expert.down(hidden)
            l1 = l1 + 0.1 * (hidden.float().abs() * (weight[:, e : e + 1] > 0)).sum() / len(tokens)
        return y.view_as(x), l1

    found = []
    for call in (lambda x: (moe(x), sum(e.penalty for e in moe.experts)), by_hand):
        moe.zero_grad()
        z = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, l1 = call(z)
        (y.float().square().sum() + l1).backward()
        found.append([y, l1, z.grad, *(p.grad for p in moe.parameters())])
    for got, expected in zip(*found, strict=True):
        assert (got - expected).abs().max() < 0.02 * expected.abs().max() + 1e-6


def test_half_precision_products_have_few_sizes(make_act, monkeypatch):
    """Whatever the loads: multiples of 64 rows, since a kernel is made for each size."""
    sizes, linear = set(), F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: sizes.add(len(x)) or linear(x, *more))
    moe = make_moe(make_act)
    with torch.autocast("cpu", torch.bfloat16):
        for n in (150, 171, 203):
            moe.experts(torch.randn(n, D), torch.rand(n, E).topk(2).indices, torch.rand(n, 2))
    assert sizes <= {64, 128, 192}
