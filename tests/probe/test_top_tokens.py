"""The tokens that a neuron answers to most, against a sort of everything."""

import numpy as np
import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.probe import core
from ffnlab.probe.base import Site
from ffnlab.probe.top_tokens import TopTokens, largest


def by_sorting(values: np.ndarray, k: int) -> np.ndarray:
    """(N, F) -> positions (F, k): largest value first, then lowest position."""
    places = np.arange(len(values))
    return np.stack([np.lexsort((places, -column))[:k] for column in values.T])


@pytest.mark.parametrize("levels", [2, 5, 10**6])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_the_first_of_equal_values(levels, k):
    values = torch.randint(0, levels, (50, 30), generator=torch.Generator().manual_seed(0)).float()
    top, place = largest(values.T.contiguous(), k)
    expected = by_sorting(values.numpy(), k)
    np.testing.assert_array_equal(place, expected)
    np.testing.assert_array_equal(top, np.take_along_axis(values.numpy().T, expected, axis=1))


@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_chunks_give_what_one_look_gives(chunk):
    """Values with many ties, cut in chunks that are shorter and longer than k."""
    probe = TopTokens(every=1, k=10)
    probe.watch(["blocks.0.ffn.act"])
    rows = torch.randint(0, 4, (64, 20), generator=torch.Generator().manual_seed(1)).float()
    _, scanner = probe.scanner(torch.nn.Module())
    for start in range(0, 64, chunk):
        scanner.see(Site("blocks.0.ffn.act", "output"), rows[start : start + chunk], start)
    seen = scanner.result().arrays
    expected = by_sorting(rows.numpy(), 10)
    np.testing.assert_array_equal(seen["L00/top_tokens/position"][0], expected)
    np.testing.assert_array_equal(
        seen["L00/top_tokens/value"][0], np.take_along_axis(rows.numpy().T, expected, axis=1)
    )


def test_positions_in_the_scan(gpt, observer, passed, scan, monkeypatch):
    """Also of a dead neuron: the first tokens, with value 0."""
    monkeypatch.setattr(core, "SCAN_CHUNK_TOKENS", 25)  # two windows of 12
    model = gpt(bias=frozenset({"up"}))
    with torch.no_grad():
        model.blocks[1]["ffn"].up.bias[5] = -100.0
    seen = observer(model, {"top_tokens": TopTokens(every=1, k=4)}).scan(0)
    post = passed(model, scan, ["blocks.1.ffn.act"])["blocks.1.ffn.act"][1].flatten(0, 1).numpy()
    position, dims = seen.arrays["L01/top_tokens/position"]
    assert dims == ("neuron", "rank")
    assert position.dtype == np.int32
    value, _ = seen.arrays["L01/top_tokens/value"]
    assert value.dtype == np.float16
    assert position[5].tolist() == [0, 1, 2, 3]
    assert value[5].tolist() == [0, 0, 0, 0]
    top = -np.sort(-post, axis=0)[:4].T
    np.testing.assert_allclose(value, top, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(
        np.take_along_axis(post.T, position.astype(int), axis=1), top, rtol=1e-4, atol=1e-7
    )


def test_values_stay_finite():
    probe = TopTokens(every=1, k=1)
    probe.watch(["blocks.0.ffn.act"])
    _, scanner = probe.scanner(torch.nn.Module())
    scanner.see(Site("blocks.0.ffn.act", "output"), torch.full((2, 1), 1e6), 0)
    assert scanner.result().arrays["L00/top_tokens/value"][0] == 65504


def test_bad_k():
    with pytest.raises(UserError, match=r"probe\.top_tokens\.k is 0"):
        TopTokens(every=1, k=0)
    with pytest.raises(UserError, match=r"probe\.top_tokens\.every is 0"):
        TopTokens(every=0, k=1)
