"""The measures of sparsity against a search over all answers."""

import pytest
import torch

from ffnlab.errors import UserError
from ffnlab.nn.ffn.swiglu import SwiGLU
from ffnlab.probe.sparsity import Sparsity, energy_frac, truncate


def sparsity(cett: float = 0.2) -> dict[str, Sparsity]:
    return {"sparsity": Sparsity(every=1, energy=0.99, cett=cett)}


def test_energy_of_the_largest_neurons_by_hand():
    """Token 1: 9, 1, 0, 0 of 10 (99 % take both); token 2: all in one; token 3: nothing, does not count."""
    hidden = torch.tensor([[1.0, -3.0, 0, 0], [0, 0, 5, 0], [0, 0, 0, 0]])
    assert energy_frac(hidden, 0.99) == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert energy_frac(hidden, 0.9) == pytest.approx(1 / 4)
    assert energy_frac(hidden[2:], 0.99) is None


def test_two_of_four_and_zeros(gpt, observer, batch):
    model = gpt(ffn=SwiGLU)
    seen = observer(model, sparsity()).observe(0)
    hidden = []
    with model.blocks[2]["ffn"].down.register_forward_pre_hook(lambda module, args: hidden.append(args[0])):
        model.eval()(batch[0])
    h = hidden[0][batch[1]]
    assert seen.scalars["probe/sparsity/L02/zero_frac"] == pytest.approx((h == 0).float().mean().item())
    few = sum((row[i : i + 4] != 0).sum() <= 2 for row in h for i in range(0, 40, 4)) / (8 * 10)
    assert seen.scalars["probe/sparsity/L02/two_four_frac"] == pytest.approx(float(few))
    relu2 = observer(gpt(), sparsity()).observe(0)
    assert 0.5 < relu2.scalars["probe/sparsity/L02/two_four_frac"] < 0.9  # 11/16 for fair coins


@pytest.mark.parametrize("limit", [0.05, 0.2, 0.6])
def test_tail_truncation_is_the_best_threshold(limit):
    """All thresholds tried: CETT at the one found is within the limit, one pair more would exceed it."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 30, generator=random).relu().square()
    hidden[4] = 0.0  # a token without output does not count
    weights = torch.randn(30, 8, generator=random)
    sizes = hidden.abs() * weights.norm(dim=1)
    whole = (hidden @ weights).norm(dim=1)

    def cett(threshold: float) -> float:
        tail = (hidden * (sizes < threshold)) @ weights
        return (tail.norm(dim=1) / whole)[whole > 0].mean().item()

    found = truncate(hidden, weights, limit)
    assert found is not None
    kept, threshold = found
    within = max(size for size in sizes.flatten().tolist() if cett(size) <= limit)
    assert threshold == pytest.approx(within)
    assert kept == pytest.approx(((sizes >= threshold) & (sizes > 0)).float().mean().item())


def test_a_layer_without_output_has_no_truncation(gpt, observer):
    model = gpt()
    with torch.no_grad():
        model.blocks[0]["ffn"].down.weight.zero_()
    seen = observer(model, sparsity()).observe(0)
    assert "probe/sparsity/L00/cett_frac" not in seen.scalars
    assert 0 < seen.scalars["probe/sparsity/L01/cett_frac"] < 0.5


@pytest.mark.parametrize("changes", [{"energy": 1.0}, {"cett": 0.0}])
def test_bad_options(changes):
    with pytest.raises(UserError, match=r"probe\.sparsity\."):
        Sparsity(**{"every": 1, "energy": 0.99, "cett": 0.2, **changes})
