"""Gradients by module and neuron against autograd, in the shapes of every FFN variant."""

from functools import partial

import pytest
import torch

from ffnlab import build
from ffnlab.nn.act.relu import ReLU
from ffnlab.probe.gradients import Gradients
from ffnlab.probe.matrices import linears, neuron_weights, parts, ways

TINY = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.seq_len=16", "model.zero_out=false"]


def pulled(model, tokens, observer):
    """The model with the gradients of its loss, and what the probe says before and after an update of SGD."""
    watcher = observer(model, {"gradients": Gradients(every=1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watcher.on_gradients(1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return watcher.observe(1), grads, before


def test_norms_and_update_ratios(gpt, observer, batch):
    model = gpt(bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[3]["ffn"].down.weight.zero_()
    seen, grads, before = pulled(model, batch[0], observer)
    up = torch.cat([grads[f"blocks.2.ffn.up.{name}"].flatten() for name in ("weight", "bias")]).norm().item()
    size = torch.cat([before[f"blocks.2.ffn.up.{name}"].flatten() for name in ("weight", "bias")]).norm()
    assert seen.scalars["probe/gradients/blocks.2.ffn.up/norm"] == pytest.approx(up, rel=1e-5)
    ratio = seen.scalars["probe/gradients/blocks.2.ffn.up/update_ratio"]
    assert ratio == pytest.approx(0.25 * up / size.item(), rel=1e-4)
    assert seen.scalars["probe/gradients/embed/norm"] == pytest.approx(grads["embed.weight"].norm().item())
    assert "probe/gradients/blocks.3.ffn.down/update_ratio" not in seen.scalars  # it started at 0
    for way, axis in (("up", 1), ("down", 0)):
        array, dims = seen.arrays[f"L02/gradients/{way}_norm"]
        assert dims == ("neuron",)
        expected = grads[f"blocks.2.ffn.{way}.weight"].norm(dim=axis)
        torch.testing.assert_close(torch.from_numpy(array), expected)


def test_a_neuron_that_no_token_activates_has_no_gradient(gpt, observer, batch):
    """E47: seven neurons of a ReLU below any pre-activation; the others have one."""
    model = gpt(act=lambda n: ReLU(d_ff=n), bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[1]["ffn"].up.bias[:7] = -100.0
        model.blocks[1]["ffn"].up.bias[7:] = 100.0
    seen, _, _ = pulled(model, batch[0], observer)
    assert seen.scalars["probe/gradients/L01/zero_frac"] == pytest.approx(7 / 40)
    assert (seen.arrays["L01/gradients/up_norm"][0] == 0).tolist() == [True] * 7 + [False] * 33


def test_no_gradient_no_report(gpt, observer):
    seen = observer(gpt(), {"gradients": Gradients(every=1)}).observe(0)
    assert not seen.scalars
    assert not seen.arrays


FFNS = ["mlp", "swiglu", "paired", "paired_init", "dual_path", "low_rank", "multi", "moe", "dynamic"]


def note(seen: list, _module, args: tuple) -> None:
    seen.append(args[0])


@pytest.mark.parametrize(
    "ffn",
    [
        pytest.param(ffn, marks=[pytest.mark.slow] if ffn in ("paired_init", "multi", "dynamic") else [])
        for ffn in FFNS
    ],
)
def test_which_vectors_are_a_neurons_own(ffn):
    """down(h) = sum over neurons of h_j d_j, pre_j = u_j . x: with the vectors that the probes take."""
    model = build.model(build.compose([*TINY, f"ffn={ffn}"])[0], 97)
    acts = [
        name for name, _ in model.named_modules() if name.startswith("blocks.1.ffn") and name.endswith(".act")
    ]
    acts = [name for name in acts if ".act." not in name and not name.endswith(".act.act")]
    assert acts
    for part, act in zip(parts(model, acts), acts, strict=True):
        x, seen = torch.randn(5, 32), []
        with (
            torch.no_grad(),
            model.get_submodule(act).register_forward_pre_hook(partial(note, seen)),
            part.down.register_forward_pre_hook(partial(note, seen)),
        ):
            out = part(x)
        pre, hidden = seen
        reads = "gate" if "gate" in ways(part) else "up"
        torch.testing.assert_close(x @ neuron_weights(part, reads).T, pre, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(hidden @ neuron_weights(part, "down"), out, atol=1e-5, rtol=1e-4)
        assert sum(linear.in_features for linear in linears(part, "down")) == part.d_ff


@pytest.mark.parametrize("ffn", ["paired", "dual_path", "low_rank", "moe"])
def test_one_number_for_each_neuron(ffn, observer):
    model = build.model(build.compose([*TINY, f"ffn={ffn}"])[0], 97)
    tokens = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(0))
    seen, grads, _ = pulled(model, tokens, observer)
    up, down = (torch.from_numpy(seen.arrays[f"L01/gradients/{way}_norm"][0]) for way in ("up", "down"))
    expected = {
        "paired": lambda: grads["blocks.1.ffn.up.weight"].norm(dim=1).repeat(2),
        "dual_path": lambda: grads["blocks.1.ffn.up.weight"].norm(dim=1).repeat(2),
        "low_rank": lambda: grads["blocks.1.ffn.up.out.weight"].norm(dim=1),
        "moe": lambda: torch.cat(
            [grads[f"blocks.1.ffn.experts.{e}.up.weight"].norm(dim=1) for e in range(8)]
        ),
    }[ffn]()
    torch.testing.assert_close(up, expected[: len(up)])
    sides = {
        "paired": lambda: grads["blocks.1.ffn.down.weight"],
        "dual_path": lambda: torch.cat(
            [grads[f"blocks.1.ffn.down.{s}.weight"] for s in ("plus", "minus")], 1
        ),
        "low_rank": lambda: grads["blocks.1.ffn.down.into.weight"],
        "moe": lambda: torch.cat([grads[f"blocks.1.ffn.experts.{e}.down.weight"] for e in range(8)], 1),
    }[ffn]()
    torch.testing.assert_close(down, sides.norm(dim=0))
