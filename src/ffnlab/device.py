"""Where and in which precision a run computes: `auto` resolved against the machine."""

import os
import platform
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch

from ffnlab.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(wish: str) -> torch.device:
    """`auto`: cuda, else mps, else cpu. Raises UserError for a device that this machine lacks."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wish == "auto":
        return torch.device(next(name for name, there in present.items() if there))
    if not present[wish]:
        there = ", ".join(name for name, is_there in present.items() if is_there)
        raise UserError(
            f"train.device={wish}: this machine has none that PyTorch can use. Available: {there}"
        )
    return torch.device(wish)


def has_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16: AVX512-BF16 or AMX on a CPU, Ampere or later on CUDA, M-series
    on MPS.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def has_fp16(device: torch.device) -> bool:
    """Whether the hardware multiplies fp16: AVX512-FP16 or AMX-FP16 on a CPU, any CUDA or MPS device."""
    if device.type != "cpu":
        return True
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_fp16") or found.get("amx_fp16"))


def choose_precision(wish: str, device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    """`auto`: bf16 where the hardware has it, else fp32. Raises UserError for bf16 where it is only
    emulated.
    """
    if wish == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    if wish == "bf16" and not has_bf16(device):
        raise UserError(
            f"train.precision=bf16: this {device.type} has no bf16 arithmetic. "
            "Use train.precision=fp32 or auto"
        )
    assert wish in ("fp32", "bf16", "fp16")
    return wish


def autocast(device: torch.device, precision: str) -> Callable[[], AbstractContextManager]:
    """A maker of contexts in which matrix products run in `precision`; parameters stay fp32."""
    return nullcontext if precision == "fp32" else partial(torch.autocast, device.type, DTYPES[precision])


def set_threads(wish: int | str, stored: int | None) -> int:
    """Use `wish` CPU threads, for `auto` those that the run was started with, else OMP_NUM_THREADS, else all
    cores.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    fresh = int(asked) if asked.isdigit() and int(asked) > 0 else available
    threads = (stored or fresh) if wish == "auto" else int(wish)
    if stored and threads != stored:
        warnings.warn(
            f"{threads} threads instead of {stored} before: this resume is not bit-exact", stacklevel=2
        )
    torch.set_num_threads(threads)
    return threads


def instruction_set() -> str:
    """What the results depend on besides threads: processor family and the vector instructions that PyTorch
    uses.
    """
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
