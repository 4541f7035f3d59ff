"""Tokens computed one by one, behind what is kept of those before, give what all at once give."""

from typing import Any

import pytest
import torch

from ffnlab import build
from ffnlab.nn.crossover import Kernels
from ffnlab.verbs.sample import can_follow, generate

TINY = ["model.n_layers=4", "model.d_model=16", "model.n_heads=4", "model.seq_len=12", "model.zero_out=false"]
MODELS = {
    "modern": [],
    "speedrun": ["arch=speedrun", "threshold=learned", "model.value_embeddings=[[0,2]]"],
    "nanogpt": ["arch=nanogpt"],
    "llama": ["arch=llama", "attention.n_kv_heads=2"],
    "original": ["arch=original"],
    "record42": ["arch=record42", "model.n_layers=12", "model.d_model=32"],
    "streams": ["stream=[embed_norm,x0_lambdas,backout,smear]", "skip=unet_concat"],
    "window": ["attention.window=3", "attention.long_layers=[1]"],
    "experts": ["ffn=moe"],
    "parallel": ["model.order=parallel", "attention.gate=true"],
    "no attention": ["attention=none"],
}


def gpt(*own: str) -> Any:
    """A model in which every parameter does something."""
    cfg, _ = build.compose([*TINY, *own])
    model = build.model(cfg, 97).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=rng))
    return model


@pytest.mark.parametrize("own", MODELS.values(), ids=list(MODELS))
@torch.no_grad()
def test_one_by_one_equals_all_at_once(own: list[str]):
    model = gpt(*own)
    tokens = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    want = model.hidden(tokens)
    past: dict = {}
    found = [model.follow(tokens[:, :5], past, 0)]
    found += [model.follow(tokens[:, t : t + 1], past, t) for t in range(5, 12)]
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=1e-4, atol=1e-4)


def test_two_tokens_behind_others_are_refused():
    model = gpt()
    with pytest.raises(ValueError, match="expected one token behind the 3 before it, got 2"):
        model.follow(torch.zeros(1, 2, dtype=torch.long), {}, 3)


@pytest.mark.parametrize("own", [[], ["ffn=switch"]], ids=["followed", "computed anew"])
def test_sampling_past_the_window_draws_what_whole_passes_draw(own: list[str]):
    model = gpt(*own)
    assert can_follow(model) == (not own)
    window = [1, 2, 3]
    with torch.no_grad():
        for _ in range(20):  # past seq_len
            hidden = model.hidden(torch.tensor([window[-12:]]))
            window.append(int(model.head.logits(hidden[0, -1])[: model.vocab_size].argmax()))
    assert list(generate(model, [1, 2, 3], 20, temperature=0, top_k=None, seed=0)) == window[3:]


def test_the_sparse_way_draws_the_same():
    model = gpt("act=relu2", "threshold=learned")
    want = list(generate(model, [1, 2, 3], 8, temperature=0, top_k=None, seed=0))
    assert Kernels(model, "sparse", torch.float32).share() == 1
    assert list(generate(model, [1, 2, 3], 8, temperature=0, top_k=None, seed=0)) == want
