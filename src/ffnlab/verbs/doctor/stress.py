"""Large inputs through every FFN, in every precision (E83)."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffnlab.device import DTYPES, autocast
from ffnlab.probe.base import layers
from ffnlab.probe.forward import aside
from ffnlab.verbs.doctor.finding import Finding
from ffnlab.verbs.doctor.subject import Subject

ROWS, SCALE = 1000, 10.0  # the input is randn(ROWS, D) * SCALE
FFN = re.compile(r"blocks\.(\d+)\.(ffn\w*)")


def check(subject: Subject) -> Iterator[Finding]:
    """The largest number in every FFN, and in which precision one of them was not finite."""
    model, device = subject.model, subject.device
    rng = torch.Generator().manual_seed(0)
    x = (torch.randn(ROWS, model.d_model, generator=rng) * SCALE).to(device)
    ffns = [(match, module) for name, module in model.named_modules() if (match := FFN.fullmatch(name))]
    for precision in (name for name in DTYPES if multiplies(device, DTYPES[name])):
        with aside(model, autocast(device, precision)):
            peaks = [peak(module, match[0], x) for match, module in ffns]
        for (match, _), value in zip(ffns, peaks, strict=True):
            label = f"L{int(match[1]):02d}{match[2].removeprefix('ffn')}"
            yield judge(subject, precision, label, value, torch.finfo(DTYPES[precision]).max)


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has a matrix product of this type on this device, in hardware or not."""
    try:
        torch.mm(torch.ones(2, 2, dtype=dtype, device=device), torch.ones(2, 2, dtype=dtype, device=device))
    except (RuntimeError, TypeError):
        return False
    return True


def peak(ffn: nn.Module, name: str, x: Float[Tensor, "N D"]) -> float:
    """The largest |number| before, after and behind the activations; NaN or inf where one is not finite.

    The inside counts as well: as long as `down` is zero nothing of it would show in the output.
    """
    seen: list[float] = []

    def note(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend(largest(tensor) for tensor in (args[0], output) if tensor.numel())

    acts = {
        act
        for found in layers(f"{name}.{inner}" for inner, _ in ffn.named_modules()).values()
        for act in found
    }
    with ExitStack() as hooks:
        for act in acts:
            hooks.callback(ffn.get_submodule(act[len(name) + 1 :]).register_forward_hook(note).remove)
        seen.append(largest(ffn(x)))
    return next((value for value in seen if not math.isfinite(value)), max(seen))


def largest(tensor: Tensor) -> float:
    return tensor.abs().amax().item()  # amax hands on a NaN


def judge(subject: Subject, precision: str, label: str, value: float, limit: float) -> Finding:
    """Bad in the precision in which the model trains, and in fp32; elsewhere it is good to know."""
    finite = math.isfinite(value)
    hurts = precision in ("fp32", subject.precision)
    instead = "norm_ffn=rmsnorm" if precision == "fp32" else "train.precision=fp32"
    remedy = f"act=tanh or act=gelu, residual=peri, or {instead}"
    verdict = "ok" if finite else "bad" if hurts else "look"
    return Finding(
        f"stress input, {precision}",
        label,
        value,
        f"finite (below {limit:.1e})",
        verdict,
        "" if finite else remedy if hurts else f"keep away from train.precision={precision}",
        shown=f"largest {value:.3g}",
        off=value / limit if finite else math.inf,
    )
