"""Lengths, cosines and angles of the neurons' vectors, one by one in float64."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.nn.ffn.mlp import MLP
from ffnlab.nn.ffn.swiglu import SwiGLU
from ffnlab.probe.weights import Weights, cosines


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def degrees(x: torch.Tensor, w: torch.Tensor) -> np.ndarray:
    return np.array(
        [math.degrees(math.acos(cos(a, b))) for a in x.double().numpy() for b in w.double().numpy()]
    )


@pytest.mark.parametrize("ffn", [MLP, SwiGLU])
def test_every_neuron_by_hand(gpt, observer, passed, batch, ffn):
    model = gpt(ffn=ffn, bias=frozenset({"up", "gate"}))
    seen = observer(model, {"weights": Weights(every=1, sample=1000)}).observe(0)
    front = "gate" if ffn is SwiGLU else "up"
    module = model.blocks[2]["ffn"]
    for name in {"up", front}:
        rows = getattr(module, name).weight.detach().double().numpy()
        lengths = [math.sqrt(sum(row**2)) for row in rows]
        others = [np.mean([abs(cos(a, b)) for j, b in enumerate(rows) if j != i]) for i, a in enumerate(rows)]
        for what, expected in (("norm", lengths), ("cosine", others)):
            array, dims = seen.arrays[f"L02/weights/{name}_{what}"]
            assert dims == ("neuron",)
            np.testing.assert_allclose(array, expected, rtol=1e-5)
            assert seen.scalars[f"probe/weights/L02/{name}_{what}"] == pytest.approx(
                np.mean(expected), rel=1e-5
            )
    down = module.down.weight.detach().double().numpy()
    lengths = [math.sqrt(sum(down[:, j] ** 2)) for j in range(40)]
    np.testing.assert_allclose(seen.arrays["L02/weights/down_norm"][0], lengths, rtol=1e-5)
    assert ("L02/weights/gate_norm" in seen.arrays) == (front == "gate")

    x = passed(model, batch[0], [f"blocks.2.ffn.{front}"])[f"blocks.2.ffn.{front}"][0][batch[1]]
    angles = degrees(x, getattr(module, front).weight.detach())
    assert len(angles) == 8 * 40
    found = [seen.scalars[f"probe/weights/L02/{name}_deg"] for name in ("angle", "angle_sd", "angle_min")]
    assert found == pytest.approx([angles.mean(), angles.std(), angles.min()], rel=1e-4)


def test_random_directions_are_nearly_at_right_angles():
    """E42: cos of independent directions has sd 1/sqrt(D), and |cos| the mean sqrt(2/(pi D))."""
    rows = torch.randn(2000, 768, generator=torch.Generator().manual_seed(0))
    assert cosines(rows, 256).mean().item() == pytest.approx(math.sqrt(2 / (math.pi * 768)), rel=0.01)


def test_a_sample_of_the_rows_without_the_row_itself():
    rows = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
    chosen = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:4].tolist()
    pairs = rows.double().numpy()
    expected = [np.mean([abs(cos(a, pairs[j])) for j in chosen if j != i]) for i, a in enumerate(pairs)]
    np.testing.assert_allclose(cosines(rows, 4), expected, rtol=1e-5)


def test_an_expert_meets_its_own_tokens(look, passed):
    """An angle for each pair of a probed token and a neuron of one of its experts."""
    gpt, tokens, mask, seen, _ = look("ffn=moe", "probe=weights")
    ffn = gpt.blocks[1]["ffn"]
    x = passed(gpt, tokens, ["blocks.1.ffn"])["blocks.1.ffn"][0][mask]
    chosen = (x @ ffn.router.weight.T).topk(2).indices
    angles = [degrees(x[(chosen == e).any(1)], ffn.experts[e].up.weight.detach()) for e in range(8)]
    everything = np.concatenate(angles)
    assert len(everything) == 20 * 2 * ffn.d_ff
    found = [seen.scalars[f"probe/weights/L01/{name}_deg"] for name in ("angle", "angle_sd", "angle_min")]
    assert found == pytest.approx([everything.mean(), everything.std(), everything.min()], rel=1e-4)
    assert seen.arrays["L01/weights/up_norm"][0].shape == (8 * ffn.d_ff,)


def test_vectors_are_measured_in_full_precision_under_autocast(gpt, observer):
    model, probes = gpt(), {"weights": Weights(every=1, sample=8)}
    full = observer(model, probes).observe(0).arrays
    mixed = observer(model, probes, autocast=partial(torch.autocast, "cpu", torch.bfloat16)).observe(0).arrays
    for name, (array, _) in full.items():
        np.testing.assert_array_equal(mixed[name][0], array)


def test_bad_sample():
    with pytest.raises(UserError, match=r"probe\.weights\.sample is 0"):
        Weights(every=1, sample=0)
