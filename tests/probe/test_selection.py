"""What the tokens that activate a neuron have in common, token by token in float64."""

import math

import numpy as np
import pytest
import torch

from ffnlab.analysis import geometry
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.ffn.swiglu import SwiGLU
from ffnlab.probe import core
from ffnlab.probe.base import Site
from ffnlab.probe.selection import Selection


def by_hand(x: np.ndarray, active: np.ndarray) -> tuple[float, float]:
    """Shift and chance shift of one neuron; `active` is true on some tokens, not on all."""
    rest = x - x.mean(0)
    spread = (rest**2).sum(1).mean()
    n, chosen = len(x), int(active.sum())
    chance = math.sqrt((1 / chosen - 1 / n) * n / (n - 1))
    return float(np.linalg.norm(rest[active].mean(0)) / math.sqrt(spread)), chance


def rms(values: list[float]) -> float:
    return math.sqrt(np.mean(np.square(values)))


@pytest.mark.parametrize("ffn", [MLP, SwiGLU])
def test_every_neuron_by_hand(gpt, observer, passed, scan, monkeypatch, ffn):
    """In chunks of two windows; of a neuron that is never active and one that always is, nothing is said."""
    monkeypatch.setattr(core, "SCAN_CHUNK_TOKENS", 25)
    model = gpt(ffn=ffn, bias=frozenset({"up", "gate"}))
    front = "gate" if ffn is SwiGLU else "up"
    with torch.no_grad():
        getattr(model.blocks[1]["ffn"], front).bias[5:7] = torch.tensor([-100.0, 100.0])
    seen = observer(model, {"selection": Selection(every=1)}).scan(0)
    held = passed(model, scan, [f"blocks.1.ffn.{front}", "blocks.1.ffn.act"])
    x = held[f"blocks.1.ffn.{front}"][0].flatten(0, 1).double().numpy()
    active = held["blocks.1.ffn.act"][1].flatten(0, 1).numpy() > 0
    known = [j for j in range(40) if 0 < active[:, j].sum() < len(x)]
    assert not {5, 6} & set(known)
    expected, chance = zip(*(by_hand(x, active[:, j]) for j in known), strict=True)
    found, dims = seen.arrays["L01/selection/shift"]
    assert dims == ("neuron",)
    np.testing.assert_allclose(found[known], expected, rtol=1e-4)
    assert np.isnan(np.delete(found, known)).all()
    assert seen.scalars["probe/selection/L01/shift"] == pytest.approx(rms(expected), rel=1e-4)
    assert seen.scalars["probe/selection/L01/chance_shift"] == pytest.approx(rms(chance), rel=1e-4)


def scanned(x: torch.Tensor, active: torch.Tensor) -> dict[str, float]:
    """The scalars of a layer with these inputs and these neurons."""
    probe = Selection(every=1)
    probe.watch(["blocks.0.ffn", "blocks.0.ffn.up", "blocks.0.ffn.act"])
    _, scanner = probe.scanner(torch.nn.Module())
    scanner.see(Site("blocks.0.ffn.up", "input"), x, 0)
    scanner.see(Site("blocks.0.ffn.act", "output"), active, 0)
    return {name.rpartition("/")[2]: value for name, value in scanner.result().scalars.items()}


@pytest.mark.parametrize("frac", [0.7, 0.5, 0.3, 0.1])
def test_inputs_on_a_sphere_are_as_far_as_the_formula_says(frac):
    """E53; what chance adds is independent of what the direction gives, so squares add up."""
    random, d = torch.Generator().manual_seed(0), 32
    x = torch.nn.functional.normalize(torch.randn(20_000, d, generator=random)) * math.sqrt(d)
    w = torch.nn.functional.normalize(torch.randn(64, d, generator=random))
    seen = scanned(x, x @ w.T - geometry.threshold_for(frac, 1, d))
    exact = geometry.selected_shift(frac, d)
    assert math.sqrt(seen["shift"] ** 2 - seen["chance_shift"] ** 2) == pytest.approx(exact, rel=0.02)


def test_tokens_drawn_at_random_are_as_far_as_chance_has_it():
    random = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 16, generator=random) * torch.linspace(0.1, 3, 16)  # not alike in all directions
    seen = scanned(x, (torch.rand(2000, 500, generator=random) < 0.2).float())
    assert seen["shift"] == pytest.approx(seen["chance_shift"], rel=0.02)


def test_an_expert_is_measured_on_its_own_tokens(look, passed):
    gpt, tokens, _, _, seen = look("ffn=moe", "probe=selection")
    ffn = gpt.blocks[1]["ffn"]
    x = passed(gpt, tokens, ["blocks.1.ffn"])["blocks.1.ffn"][0].flatten(0, 1)
    chosen = (x @ ffn.router.weight.T).topk(2).indices
    found = seen.arrays["L01/selection/shift"][0].reshape(8, ffn.d_ff)
    for e, expert in enumerate(ffn.experts):
        own = x[(chosen == e).any(1)]
        active = (expert.up(own) > 0).numpy()
        for j in range(ffn.d_ff):
            if 0 < active[:, j].sum() < len(own):
                expected, _ = by_hand(own.double().numpy(), active[:, j])
                assert found[e, j] == pytest.approx(expected, rel=1e-3)
            else:
                assert np.isnan(found[e, j])
