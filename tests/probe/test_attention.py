"""What each head looks at, from PyTorch's own attention: of values that are the unit vectors it gives p."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ffnlab.nn import attention

BF16 = partial(torch.autocast, "cpu", torch.bfloat16)


def distributions(gpt, tokens, monkeypatch, autocast) -> list[torch.Tensor]:
    """p (B, H, T, T) of every layer, from the q, k, mask and scale that the model multiplies with."""
    seen, attend = [], attention.attend

    def keep(q, k, v, mask, scale, dropout, latest):
        unit = torch.eye(16).expand(3, k.shape[1], 16, 16)
        options = {"is_causal": mask is None, "scale": scale, "enable_gqa": q.shape[1] > k.shape[1]}
        with torch.autocast("cpu", enabled=False):
            seen.append(scaled_dot_product_attention(q.float(), k.float(), unit, attn_mask=mask, **options))
        return attend(q, k, v, mask, scale, dropout, latest)

    monkeypatch.setattr(attention, "attend", keep)
    with torch.no_grad(), autocast():
        gpt.eval()(tokens)
    return seen


@pytest.mark.parametrize(
    ("overrides", "autocast"),
    [
        ([], torch.no_grad),
        ([], BF16),
        (["attention.n_kv_heads=2", "attention.window=5", "attention.long_layers=[3]"], torch.no_grad),
        (["attention=record42", "attention.scale=2.0"], torch.no_grad),
        (["arch=nanogpt", "model.order=parallel"], torch.no_grad),
    ],
)
def test_entropy_and_sink_of_every_head(look, monkeypatch, overrides, autocast):
    sizes = ["probe=attention", "model.n_heads=4"]
    gpt, tokens, mask, seen, _ = look(*overrides, *sizes, autocast=autocast)
    for layer, p in enumerate(distributions(gpt, tokens, monkeypatch, autocast)):
        window = 5 if "attention.window=5" in overrides and layer != 3 else 16
        expected: dict[str, list] = {"entropy": [], "entropy_frac": [], "sink_frac": []}
        for b, t in mask.nonzero().tolist():
            rows = p[b, :, t].double().numpy()  # (H, T)
            entropy = np.array([-sum(x * math.log(x) for x in row if x > 0) for row in rows])
            expected["entropy"].append(entropy)
            if t > 0:
                expected["entropy_frac"].append(entropy / math.log(min(t + 1, window)))
            if 0 < t < window:
                expected["sink_frac"].append(rows[:, 0])
        for name, values in expected.items():
            array, dims = seen.arrays[f"L{layer:02d}/attention/{name}"]
            assert dims == ("head",)
            np.testing.assert_allclose(array, np.mean(values, axis=0), rtol=1e-4, atol=1e-6)
            mean = seen.scalars[f"probe/attention/L{layer:02d}/{name}"]
            assert mean == pytest.approx(np.mean(values), rel=1e-4)
    assert len(seen.arrays) == 12


def test_equal_scores_are_shared_evenly(look):
    """Every key that is seen has the same share, and the entropy is as large as it can be."""
    _, _, mask, seen, _ = look("probe=attention", "attention.scale=1e-9")
    places = mask.nonzero()[:, 1].tolist()
    entropy = np.mean([math.log(t + 1) for t in places])
    assert seen.scalars["probe/attention/L00/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert seen.scalars["probe/attention/L00/entropy_frac"] == pytest.approx(1, rel=1e-5)
    sink = np.mean([1 / (t + 1) for t in places if t])
    assert seen.scalars["probe/attention/L00/sink_frac"] == pytest.approx(sink, rel=1e-5)


def test_positions_that_see_themselves_only(look):
    seen = look("probe=attention", "attention.window=1")[3]
    assert seen.scalars == {f"probe/attention/L{i:02d}/entropy": 0.0 for i in range(4)}
