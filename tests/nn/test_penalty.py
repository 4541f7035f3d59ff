"""What parts want besides the cross-entropy: counted once, in proportion, and felt by nobody else."""

import copy
import subprocess
import sys
import textwrap
from contextlib import nullcontext

import pytest
import torch

from ffnlab import build
from ffnlab.nn.gpt import Context, run_block_checkpointed
from ffnlab.nn.penalty import Penalised, with_penalties
from ffnlab.train import gradients

pytestmark = pytest.mark.slow  # half a second a case, many cases

TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=16", "model.zero_out=false"]
PENALISED = {
    "experts": ["ffn=moe", "ffn.balance=0.5", "ffn.z_loss=0.1"],
    "shared experts": ["ffn=moe", "ffn.share=all", "ffn.extra=true"],
    "width": ["ffn=dynamic", "ffn.target=0.2"],
    "l1": ["ffn.l1=0.01"],
    "l1 in experts": ["ffn=switch", "ffn.l1=0.01", "ffn.capacity_factor=0.5"],
    "parallel": ["ffn.l1=0.01", "model.order=parallel"],
}


def make(*overrides: str):
    cfg, _ = build.compose([*TINY, *overrides])
    gpt = build.model(cfg, 97)
    build.regulariser(cfg, gpt)(1)
    return gpt


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 97, (rows, 17), generator=torch.Generator().manual_seed(0))
    return x[:, :-1], x[:, 1:]


def grads(gpt, loss) -> dict[str, torch.Tensor]:
    gpt.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in gpt.named_parameters()}


def penalties(gpt, x) -> list[torch.Tensor]:
    ctx = Context(x)
    gpt.stream(x, ctx)
    assert ctx.penalties is not None
    return ctx.penalties


@pytest.mark.parametrize("overrides", PENALISED.values(), ids=PENALISED)
def test_the_loss_is_the_cross_entropy_and_its_gradient_that_of_the_sum(overrides):
    gpt, (x, y) = make(*overrides), batch()
    loss = gpt.loss(x, y)
    with torch.no_grad():
        torch.testing.assert_close(loss, gpt.head.loss(gpt.hidden(x).flatten(0, 1), y.flatten()))
    entropy = torch.nn.functional.cross_entropy(gpt(x).flatten(0, 1), y.flatten(), reduction="sum")
    expected = grads(gpt, entropy + y.numel() * sum(penalties(gpt, x)))
    for name, gradient in grads(gpt, gpt.loss(x, y)).items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-3, rtol=1e-3)
    entropy = torch.nn.functional.cross_entropy(gpt(x).flatten(0, 1), y.flatten(), reduction="sum")
    without = grads(gpt, entropy)
    assert any((without[name] - expected[name]).abs().max() > 0.01 for name in expected)


@pytest.mark.parametrize("overrides", PENALISED.values(), ids=PENALISED)
def test_checkpointing_changes_nothing_and_leaves_nothing_behind(overrides):
    gpt, (x, y) = make(*overrides), batch()
    plain = grads(gpt, gpt.loss(x, y))
    gpt.run_block = run_block_checkpointed
    again = grads(gpt, gpt.loss(x, y))
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(m.penalty is None for m in gpt.modules() if isinstance(m, Penalised))
    copy.deepcopy(gpt)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ["ffn=moe", "ffn=dynamic", "ffn.l1=0.01"])
def test_compiling_changes_nothing(overrides):
    """With and without checkpointing; in a process of its own, because shape checks cannot be traced."""
    code = f"""
        import torch
        from ffnlab import build
        from ffnlab.nn.gpt import run_block_checkpointed

        cfg, _ = build.compose({[*TINY, "model.n_layers=2", overrides]})
        gpt = build.model(cfg, 97)
        build.regulariser(cfg, gpt)(1)
        x = torch.randint(97, (4, 16))
        results = []
        for compiled, checkpointed in ((False, False), (True, False), (True, True)):
            torch._dynamo.reset()
            if checkpointed:
                gpt.run_block = run_block_checkpointed
            gpt.zero_grad()
            loss = (torch.compile(gpt.loss, backend="aot_eager") if compiled else gpt.loss)(x, x)
            loss.backward()
            results.append([loss, *(p.grad.clone() for p in gpt.parameters())])
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_every_call_counts_once():
    """Four layers, each with two FFNs that share their experts: eight penalties."""
    assert len(penalties(make("ffn=moe", "ffn.share=all", "ffn.extra=true"), batch()[0])) == 8
    assert len(penalties(make("ffn=moe", "model.drop_ffn=[0]"), batch()[0])) == 3
    assert penalties(make("ffn=moe").eval(), batch()[0]) == []


def test_without_penalties_the_loss_is_the_very_same_tensor():
    loss = torch.tensor(3.0)
    assert with_penalties(loss, [], torch.zeros(2, dtype=torch.long)) is loss
    assert penalties(make(), batch()[0]) == []


def test_a_micro_batch_weighs_as_much_as_its_targets():
    """Ragged micro-batches: the penalty of each is weighted by its share of the counted targets."""
    gpt, (x, y) = make("ffn.l1=0.05"), batch()
    y = y.clone()
    y[2:, 4:] = -100
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    gpt.zero_grad()
    mean, n = gradients(gpt.loss, parts, nullcontext, torch.amp.GradScaler("cpu", enabled=False))
    got = {name: p.grad.clone() for name, p in gpt.named_parameters()}
    assert n == 32 + 8
    entropy = torch.nn.functional.cross_entropy(gpt(x).flatten(0, 1), y.flatten())
    assert mean == pytest.approx(entropy.item(), rel=1e-5)
    extra = sum(penalties(gpt, x[:2])) * 32 / 40 + sum(penalties(gpt, x[2:])) * 8 / 40
    for name, gradient in grads(gpt, entropy + extra).items():
        torch.testing.assert_close(got[name], gradient, atol=1e-4, rtol=1e-3)


def test_validation_sees_no_penalty():
    gpt, (x, y) = make("ffn=moe", "ffn.balance=100.0"), batch()
    quiet = make("ffn=moe", "ffn.balance=0.0")
    with torch.no_grad():
        assert torch.equal(gpt.eval().loss(x, y), quiet.eval().loss(x, y))


@pytest.mark.parametrize("overrides", [[], ["ffn=swiglu"], ["ffn=multi"], ["ffn.extra=true"]])
def test_l1_is_summed_over_neurons_and_averaged_over_tokens_and_layers(overrides):
    """R47: stated, because a mean over neurons would be d_ff times smaller."""
    cfg, _ = build.compose([*TINY, "ffn.l1=0.3", *overrides])
    gpt, (x, _) = build.model(cfg, 97), batch()
    build.regulariser(cfg, gpt)(1)
    hidden = []
    for name, module in gpt.named_modules():
        if name.endswith(".down"):
            module.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    found = sum(penalties(gpt, x))
    sublayers = 8 if "ffn.extra=true" in overrides else 4
    expected = 0.3 * sum(h.abs().sum(-1).mean() for h in hidden) / sublayers
    torch.testing.assert_close(found, expected)


def test_l1_in_experts_counts_a_token_with_those_it_meets():
    gpt, (x, _) = make("ffn=moe", "ffn.l1=0.3", "ffn.balance=0.0", "ffn.z_loss=0.0"), batch()
    sums = []
    for name, module in gpt.named_modules():
        if name.endswith(".down"):
            module.register_forward_pre_hook(lambda module, args: sums.append(args[0].abs().sum()))
    torch.testing.assert_close(sum(penalties(gpt, x)), 0.3 * sum(sums) / x.numel() / 4)


def test_l1_warms_up_and_is_not_saved():
    cfg, _ = build.compose([*TINY, "ffn.l1=0.8", "ffn.l1_warmup=10"])
    gpt = build.model(cfg, 97)
    names = set(gpt.state_dict())
    begin = build.regulariser(cfg, gpt)
    seen = []
    for update in (1, 5, 10, 500):
        begin(update)
        seen.append(gpt.blocks[2]["ffn"].l1.item())
    assert seen == pytest.approx([0.02, 0.1, 0.2, 0.2])
    assert set(gpt.state_dict()) == names


def test_l1_makes_neurons_quiet():
    def active(coefficient: float) -> float:
        cfg, _ = build.compose([*TINY, f"ffn.l1={coefficient}", "optim=adamw", "optim.lr=0.01"])
        gpt = build.model(cfg, 97)
        optimizer, (x, y) = build.optimizer(cfg, gpt), batch()
        build.regulariser(cfg, gpt)(1)
        for _ in range(20):
            (gpt.loss(x, y) / y.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = []
        gpt.blocks[1]["ffn"].act.register_forward_hook(
            lambda m, a, out: seen.append((out > 0).float().mean())
        )
        gpt(x)
        return seen[0].item()

    assert active(1.0) < active(0.0) - 0.1


def test_the_budget_brings_the_width_to_its_target():
    cfg, _ = build.compose([*TINY, "ffn=dynamic", "ffn.target=0.25", "ffn.budget=10.0", "optim=adamw"])
    gpt = build.model(cfg, 97)
    optimizer, (x, y) = build.optimizer(cfg, gpt), batch()
    optimizer.set_factor(10.0)
    for _ in range(40):
        (gpt.loss(x, y) / y.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    shares = []
    for block in gpt.eval().blocks:
        block["ffn"].width.register_forward_hook(lambda module, args, out: shares.append(out))
    gpt(x)
    assert torch.stack(shares).mean().item() == pytest.approx(0.25, abs=0.03)


def test_a_width_is_whole_neurons_when_it_is_evaluated(make_ffn):
    ffn = make_ffn("dynamic", d_ff=10).eval()
    x = torch.randn(200, 16)
    kept = (ffn.width(x) * 10).round().squeeze(-1)
    assert torch.equal(kept, (10 * torch.sigmoid(ffn.width.controller(x))).round().squeeze(-1))
    assert len(kept.unique()) > 2
    expected = torch.stack(
        [
            ffn.down.weight[:, : int(k)] @ torch.relu(ffn.up.weight[: int(k)] @ token) ** 2
            for k, token in zip(kept, x, strict=True)
        ]
    )
    torch.testing.assert_close(ffn(x), expected)
