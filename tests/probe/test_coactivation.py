"""Correlations of activity against numpy's."""

import numpy as np
import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.probe import core
from ffnlab.probe.coactivation import Coactivation


def probe(**changes) -> dict[str, Coactivation]:
    return {
        "coactivation": Coactivation(**{"every": 1, "neurons": 16, "eigenvalues": 5, "pairs": 12, **changes})
    }


@pytest.mark.parametrize("neurons", [16, 1000])
def test_equals_numpy_on_the_neurons_that_vary(gpt, observer, passed, scan, monkeypatch, neurons):
    monkeypatch.setattr(core, "SCAN_CHUNK_TOKENS", 25)  # two windows of 12
    model = gpt(bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[1]["ffn"].up.bias[:10] = -100.0
        model.blocks[1]["ffn"].up.bias[10:20] = 100.0
    seen = observer(model, probe(neurons=neurons)).scan(0)
    post = passed(model, scan, ["blocks.1.ffn.act"])["blocks.1.ffn.act"][1].flatten(0, 1).numpy()
    drawn = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:neurons].tolist()
    varying = [j for j in sorted(drawn) if 0 < (post[:, j] > 0).sum() < 60]
    assert 5 <= len(varying) < min(neurons, 40)
    phi = np.corrcoef((post[:, varying] > 0).T)

    upper = np.triu_indices(len(varying), 1)
    eigenvalues = np.linalg.eigvalsh(phi)[::-1]
    name = "probe/coactivation/L01"
    assert seen.scalars[f"{name}/mean_abs_phi"] == pytest.approx(np.abs(phi[upper]).mean())
    ratio = eigenvalues.sum() ** 2 / np.square(eigenvalues).sum()
    assert seen.scalars[f"{name}/participation_ratio"] == pytest.approx(ratio)
    np.testing.assert_allclose(seen.arrays["L01/coactivation/eigenvalue"][0], eigenvalues[:5], rtol=1e-5)
    pair, dims = seen.arrays["L01/coactivation/pair"]
    assert dims == ("pair_rank", "side")
    assert pair.dtype == np.int32
    assert (pair[:, 0] < pair[:, 1]).all()
    found = seen.arrays["L01/coactivation/phi"][0]
    np.testing.assert_allclose(found, -np.sort(-phi[upper])[:12], rtol=1e-5)
    of = {neuron: place for place, neuron in enumerate(varying)}
    np.testing.assert_allclose(found, [phi[of[a], of[b]] for a, b in pair.tolist()], rtol=1e-5)


def test_opposite_neurons_are_never_active_together(look):
    """The two of a pair exclude each other (phi = -1); half of the eigenvalues are 0."""
    _, _, _, _, scan = look("ffn=paired", "probe=coactivation", "probe.coactivation.eigenvalues=1000")
    values = scan.arrays["L00/coactivation/eigenvalue"][0]
    values = values[~np.isnan(values)]
    assert values.sum() == pytest.approx(len(values), rel=1e-4)
    assert (np.abs(values) < 1e-4).mean() > 0.5


def test_a_layer_that_does_nothing_keeps_its_shape(gpt, observer):
    model = gpt(bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[2]["ffn"].up.bias.fill_(-100.0)
    seen = observer(model, probe()).scan(0)
    shapes = {
        name: seen.arrays[f"L02/coactivation/{name}"][0].shape for name in ("eigenvalue", "pair", "phi")
    }
    assert shapes == {"eigenvalue": (5,), "pair": (12, 2), "phi": (12,)}
    assert (seen.arrays["L02/coactivation/pair"][0] == -1).all()
    assert np.isnan(seen.arrays["L02/coactivation/phi"][0]).all()
    assert not [name for name in seen.scalars if "/L02/" in name]


def test_experts_share_the_sample(look):
    """An equal share of each; a neuron of expert e is e F + f, and inactive where its expert is not asked."""
    gpt, tokens, _, _, scan = look("ffn=moe", "probe=coactivation", "probe.coactivation.neurons=16")
    pair, phi = (scan.arrays[f"L03/coactivation/{name}"][0] for name in ("pair", "phi"))
    posts = {}
    ffn = gpt.blocks[3]["ffn"]
    for e, expert in enumerate(ffn.experts):
        expert.register_forward_pre_hook(lambda module, args, e=e: posts.update({e: [args[1]]}))
        expert.act.register_forward_hook(lambda module, args, out, e=e: posts[e].append(out))
    with torch.no_grad():
        gpt.eval()(tokens)
    active = np.zeros((48, 8 * ffn.d_ff))
    for e, (rows, post) in posts.items():
        active[rows.numpy(), e * ffn.d_ff : (e + 1) * ffn.d_ff] = post.numpy() > 0
    kept = ~np.isnan(phi)
    expected = [np.corrcoef(active[:, a], active[:, b])[0, 1] for a, b in pair[kept].tolist()]
    np.testing.assert_allclose(phi[kept], expected, rtol=1e-5)
    assert len(set((pair[kept] // ffn.d_ff).flatten().tolist())) > 4


def test_bad_sizes_are_told_together():
    with pytest.raises(UserError) as error:
        probe(neurons=1, pairs=0)
    assert "probe.coactivation.neurons is 1" in str(error.value)
    assert "probe.coactivation.pairs is 0" in str(error.value)
