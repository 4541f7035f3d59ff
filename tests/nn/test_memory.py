"""The estimate of training memory against the allocator, E104, and what each optimizer keeps."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile

from ffnlab import build
from ffnlab.device import autocast
from ffnlab.nn.gpt import run_block_checkpointed
from ffnlab.nn.memory import LiveBytes, Memory, estimate, imagined

SMALL = ("logger=none", "model.n_layers=2", "model.d_model=32", "model.seq_len=64")
CPU = torch.device("cpu")


def estimated(
    *overrides: str,
    vocab: int = 300,
    batch: int = 4,
    precision: str = "fp32",
    checkpointed: bool = False,
    grad_accum: int = 1,
    device: str = "cpu",
) -> tuple[Memory, int]:
    """The estimate, and the number of parameters."""
    cfg, _ = build.compose(["logger=none", *overrides])
    with imagined():
        model = build.model(cfg, vocab)
        memory = estimate(
            model,
            build.optimizer(cfg, model),
            batch_size=batch,
            grad_accum=grad_accum,
            precision=autocast(CPU, precision),
            checkpointed=checkpointed,
            device=device,
        )
        return memory, sum(p.numel() for p in model.parameters())


def allocated(call: Callable[[], Any]) -> tuple[int, int]:
    """The allocator's own record of `call`: bytes held at the end by what it returns, and the peak."""
    gc.collect()
    with profile(profile_memory=True) as recorded:
        kept = call()
    profiler: Any = recorded.profiler
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return now, peak


def real(
    *overrides: str,
    vocab: int = 300,
    batch: int = 4,
    precision: str = "fp32",
    checkpointed: bool = False,
    grad_accum: int = 1,
) -> tuple[int, int]:
    """What waits for the backward pass, and the peak of an update, of a real model with optimizer state."""
    cfg, _ = build.compose(["logger=none", *overrides])
    model = build.model(cfg, vocab)
    optimizer = build.optimizer(cfg, model)
    if checkpointed:
        model.run_block = run_block_checkpointed
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (batch, model.seq_len), generator=generator)

    def forward() -> torch.Tensor:
        with autocast(CPU, precision)():
            return model.loss(tokens, tokens) / tokens.numel()

    def update() -> None:
        for _ in range(grad_accum):
            forward().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    update()
    state = [s for o in optimizer.optimizers for s in o.state.values()]
    held = [*model.parameters(), *model.buffers(), *(t for s in state for t in s.values())]
    waiting, _ = allocated(forward)
    _, peak = allocated(update)
    head = 4 * model.head.weight.numel()  # the gradient that the head makes in the forward pass
    return waiting - head, peak + sum(t.nbytes for t in held) + tokens.nbytes


def test_adam_takes_sixteen_bytes_a_parameter():
    """E104: weights 4P; with gradients and two moments 16P, plus a 4-byte step counter per tensor."""
    memory, size = estimated("arch=nanogpt", *SMALL)
    assert memory.weights == memory.gradients == 4 * size
    assert 0 <= memory.weights + memory.gradients + memory.optimizer - 16 * size <= 4 * 100


@pytest.mark.parametrize(("optim", "moments"), [("adamw", 2), ("muon", 1), ("sgd", 1)])
def test_each_optimizer_is_counted_by_its_state(optim, moments):
    """AdamW keeps two moments; Muon one for matrices of blocks, and AdamW's two for embedding and head."""
    memory, size = estimated(f"optim={optim}", *SMALL)
    ends = 2 * 320 * 32 if optim == "muon" else 0  # embedding and head, padded to 320 rows
    assert memory.optimizer == pytest.approx(4 * (moments * size + ends), abs=400)


def peak_agrees(size: str, optim: str, precision: str, checkpointed: bool) -> None:
    """E104: the largest number of bytes in use during a real update, within 2 %."""
    how: dict[str, Any] = {"vocab": 2000, "batch": 1, "precision": precision, "checkpointed": checkpointed}
    memory, _ = estimated(f"model={size}", f"optim={optim}", **how)
    waiting, peak = real(f"model={size}", f"optim={optim}", **how)
    assert memory.peak == pytest.approx(peak, rel=0.02)
    # Besides tensors of the model, checkpointing keeps 5 KB of random state a block.
    assert memory.activations == pytest.approx(waiting, rel=0.02, abs=8 * 5100)


@pytest.mark.parametrize(
    ("optim", "precision", "checkpointed"), [("muon", "fp32", False), ("adamw", "bf16", True)]
)
@pytest.mark.slow
def test_the_peak_is_what_the_allocator_handed_out(optim, precision, checkpointed):
    peak_agrees("micro", optim, precision, checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optim", ["muon", "adamw"])
@pytest.mark.parametrize("size", ["nano", "micro", "mini"])
def test_the_peak_of_three_sizes(size, optim, precision, checkpointed):
    peak_agrees(size, optim, precision, checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("arch=nanogpt",),
        ("arch=speedrun", "threshold=learned", "model.n_layers=4"),
        ("ffn=swiglu",),
        ("attention.window=16", "attention.n_kv_heads=1", "skip=unet_concat", "model.n_layers=4"),
        ("residual.scale=layerscale", "residual.carry=learned", "act=xielu", "norm=dyt"),
        ("act=quantile",),
        ("act=top_k",),
        ("ffn=moe",),
        ("ffn=switch", "ffn.capacity_factor=8"),
        ("ffn=dynamic",),
        ("ffn=low_rank", "ffn.share=all"),
    ],
)
def test_every_kind_of_part_is_counted(overrides, precision):
    """As above for parts that keep unlike things, within 5 %: the tokens of real experts are not even."""
    memory, _ = estimated(*SMALL, *overrides, precision=precision)
    waiting, peak = real(*SMALL, *overrides, precision=precision)
    assert memory.activations == pytest.approx(waiting, rel=0.05)
    assert memory.peak == pytest.approx(peak, rel=0.05)


def test_gradients_wait_while_the_next_batch_is_computed():
    """With `grad_accum` they are there from the second forward pass on."""
    how: dict[str, Any] = {"vocab": 2000, "batch": 1}
    once, _ = estimated(*SMALL, "model.d_model=128", **how)
    twice, _ = estimated(*SMALL, "model.d_model=128", grad_accum=2, **how)
    assert twice.peak == pytest.approx(real(*SMALL, "model.d_model=128", grad_accum=2, **how)[1], rel=0.02)
    assert twice.peak > once.peak


def test_checkpointed_blocks_keep_less():
    kept, _ = estimated(*SMALL, "model.n_layers=4")
    recomputed, _ = estimated(*SMALL, "model.n_layers=4", checkpointed=True)
    assert recomputed.activations < kept.activations / 3
    assert recomputed.peak < kept.peak


def test_logits_of_other_devices_stand_in_larger_chunks():
    """4 x 256 positions x 2**14 words are 64 MiB of fp32 logits: one chunk of 512 MiB, eight of 8 MiB."""
    how: dict[str, Any] = {"vocab": 2**14, "batch": 4}
    small, _ = estimated(*SMALL, "model.seq_len=256", **how)
    large, _ = estimated(*SMALL, "model.seq_len=256", device="cuda", **how)
    assert large.peak - small.peak > 2 * (64 - 8) * 2**20
    assert large.activations == small.activations


def test_bytes_are_counted_while_their_tensors_live():
    """By hand: a view adds nothing, an operation in place adds nothing, and what is freed is gone."""
    held = torch.zeros(5)
    with LiveBytes([held]) as live:
        a = torch.zeros(100)
        b = a.view(10, 10).t()
        b.add_(1)
        assert live.now == 420
        c = a + b.sum()
        assert (live.now, live.peak) == (820, 824)
        del a
        assert live.now == 820  # the view still holds it
        del b, c
        assert (live.now, live.peak) == (20, 824)


def test_a_model_too_large_for_any_laptop_is_estimated():
    """A layer of GPT-3 (d = 12288): 4P bytes without allocating them; E101: 8 of the 12 d^2 are the FFN."""
    sizes = ("model.n_layers=1", "model.d_model=12288", "model.n_heads=96")
    memory, _ = estimated(*sizes, vocab=50257, batch=1)
    assert memory.weights == 4 * (12 * 12288**2 + 2 * 50304 * 12288)
