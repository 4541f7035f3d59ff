"""The estimate of training memory against the allocator, E104, and what each optimizer keeps."""

from contextlib import nullcontext

import pytest
import torch
from torch.profiler import profile

from ffnlab import build
from ffnlab.device import autocast
from ffnlab.nn.memory import Memory, activations, estimate, imagined

SMALL = ("logger=none", "model.n_layers=4", "model.d_model=32", "model.seq_len=64", "train.batch_size=4")
VOCAB = 300


def estimated(*overrides: str, checkpointed: bool = False) -> tuple[Memory, int]:
    """The estimate, and the number of parameters, of a small model."""
    cfg, _ = build.compose([*SMALL, *overrides])
    with imagined():
        model = build.model(cfg, VOCAB)
        memory = estimate(
            model,
            build.optimizer(cfg, model),
            batch_size=4,
            precision=nullcontext,
            checkpointed=checkpointed,
        )
        return memory, sum(p.numel() for p in model.parameters())


def test_adam_takes_sixteen_bytes_a_parameter():
    """E104: weights 4P; with gradients and two moments 16P, plus a 4-byte step counter per tensor."""
    memory, size = estimated("arch=nanogpt")
    assert memory.weights == memory.gradients == 4 * size
    assert 0 <= memory.weights + memory.gradients + memory.optimizer - 16 * size <= 4 * 100
    assert memory.total == memory.activations + memory.weights + memory.gradients + memory.optimizer


@pytest.mark.parametrize(("optim", "moments"), [("adamw", 2), ("muon", 1), ("sgd", 1)])
def test_each_optimizer_is_counted_by_its_state(optim, moments):
    """AdamW keeps two moments; Muon one for matrices of blocks, and AdamW's two for embedding and head."""
    memory, size = estimated(f"optim={optim}")
    ends = 2 * 320 * 32 if optim == "muon" else 0  # embedding and head, padded to 320 rows
    assert memory.optimizer == pytest.approx(4 * (moments * size + ends), abs=400)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("arch=nanogpt",),
        ("arch=speedrun", "threshold=learned"),
        ("ffn=swiglu",),
        ("attention.window=16", "attention.n_kv_heads=1", "skip=unet_concat"),
        ("residual.scale=layerscale", "residual.carry=learned", "act=xielu", "norm=dyt"),
        ("act=quantile",),
        ("act=top_k",),
        ("ffn=moe",),
        ("ffn=switch", "ffn.capacity_factor=8"),
        ("ffn=dynamic",),
        ("ffn=low_rank", "ffn.share=all"),
    ],
)
def test_activations_are_what_the_allocator_holds(overrides, precision):
    """The bytes allocated and not freed in a real forward pass, counted by the profiler, within 5 %."""
    cfg, _ = build.compose([*SMALL, *overrides])
    context = autocast(torch.device("cpu"), precision)
    with imagined():
        expected = activations(build.model(cfg, VOCAB), 4, context)
    model = build.model(cfg, VOCAB)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    with profile(profile_memory=True) as recorded, context():
        out = model.hidden(tokens)
    held = sum(event.self_cpu_memory_usage for event in recorded.key_averages())
    assert out.requires_grad
    assert expected == pytest.approx(held, rel=0.05)


def test_checkpointed_blocks_keep_less():
    kept, _ = estimated("model.n_layers=8")
    recomputed, _ = estimated("model.n_layers=8", checkpointed=True)
    assert recomputed.activations < kept.activations / 3


def test_a_model_too_large_for_any_laptop_is_estimated():
    """A layer of GPT-3 (d = 12288): 4P bytes without allocating them; E101: 8 of the 12 d^2 are the FFN."""
    cfg, _ = build.compose(["logger=none", "model.n_layers=1", "model.d_model=12288", "model.n_heads=96"])
    with imagined():
        model = build.model(cfg, 50257)
        memory = estimate(
            model, build.optimizer(cfg, model), batch_size=1, precision=nullcontext, checkpointed=False
        )
    assert memory.weights == 4 * (12 * 12288**2 + 2 * 50304 * 12288)
