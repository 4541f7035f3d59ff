"""Which modules are neurons, and how they are called."""

import pytest
import torch
from torch import nn

from ffnlab.errors import UserError
from ffnlab.probe.base import Captured, Probe, Site, layers
from ffnlab.probe.forward import crop, watch


def test_layers_by_label():
    names = [
        "embed",
        "blocks.0.attn.act",
        "blocks.3.ffn.up",
        "blocks.3.ffn.act",
        "blocks.3.ffn.act.act",
        "blocks.3.ffn_extra.act",
        "blocks.11.ffn.experts.0.act",
        "blocks.11.ffn.experts.1.act",
        "head.act",
        "blocks.3.residual.ffn.act",
    ]
    assert layers(names) == {
        "L03": ["blocks.3.ffn.act"],
        "L03_extra": ["blocks.3.ffn_extra.act"],
        "L11": ["blocks.11.ffn.experts.0.act", "blocks.11.ffn.experts.1.act"],
    }


def test_neurons_of_experts_follow_each_other():
    acts = ["a", "b"]
    values = {Site("a", "input"): torch.zeros(3, 2), Site("b", "input"): torch.ones(3, 4)}
    neurons = Captured(torch.zeros(3, dtype=torch.long), values).neurons(acts, "input")
    assert torch.equal(neurons, torch.tensor([[0.0, 0, 1, 1, 1, 1]] * 3))


class Rows(nn.Module):
    """Runs `act` on the tokens in another shape."""

    def __init__(self, *shape: int):
        super().__init__()
        self.shape = shape
        self.act = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.act(tokens.float().reshape(*self.shape))


@pytest.mark.parametrize("shape", [(2, 6, 1), (12, 1), (2, 6, 1, 1)])
def test_a_row_per_token_in_any_shape(shape):
    tokens, seen = torch.arange(12).view(2, 6), {}
    watch(Rows(*shape), tokens, {Site("act", "input")}, seen.__setitem__)
    assert torch.equal(seen[Site("act", "input")], torch.arange(12.0).view(12, 1))


def test_rows_that_are_not_tokens_are_refused():
    model = Rows(3, 4)
    with pytest.raises(RuntimeError, match="one row per token"):
        watch(model, torch.arange(12).view(2, 6), {Site("act", "output")}, lambda site, rows: None)
    assert not model.act._forward_hooks


def test_crop_keeps_what_reaches_the_probed_positions():
    tokens, mask = torch.arange(15).view(3, 5), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 1] = mask[2, 3] = True
    cropped, marks = crop(tokens, mask)
    assert cropped.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert cropped[marks].tolist() == [1, 13]


def test_bad_every():
    with pytest.raises(UserError, match=r"probe\.probe\.every is 0"):
        Probe(every=0)
