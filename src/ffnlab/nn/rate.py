"""How fast this machine multiplies matrices: the ceiling against which a training step is measured.

`perf/mfu` = training FLOPs per second (`nn.count`) / this rate. It stands beside `count` because the two are
the halves of one fraction, and on floor 0 because `run` and the verbs both read it; the folder of the cache
is handed in, since floor 0 does not import `data`.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ffnlab import foreign

FILE = "matrix_rate.json"
SIZE = {"cpu": 1024, "cuda": 8192, "mps": 4096}


def product(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """A function that multiplies two square matrices once and returns the FLOPs per second it reached."""
    size = SIZE.get(device.type, 1024)
    a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))

    def once() -> float:
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        return 2 * size**3 / (time.perf_counter() - start)

    once()  # the first product pays for the library's start-up
    return once


def measure(device: torch.device, dtype: torch.dtype, *, budget_s: float = 0.4) -> float:
    """FLOPs per second of the fastest square product seen within about `budget_s` seconds (at least three).

    The fastest, because a ceiling is asked for and every disturbance can only slow a product down.
    """
    once = product(device, dtype)
    rates = [once() for _ in range(3)]
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end:
        rates.append(once())
    return max(rates)


def machine(device: torch.device, dtype: torch.dtype) -> str:
    """The name under which a rate is kept: all that it depends on, the number of threads included."""
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"{platform.node()} {cpu_name()} {torch.get_num_threads()} threads"
    return f"{device.type} {what} torch {torch.__version__} {str(dtype).removeprefix('torch.')}"


def cached(cache: Path, device: torch.device, dtype: torch.dtype) -> float:
    """The rate of this machine, measured the first time and read from `cache`/matrix_rate.json ever after.

    A file that is torn or not ours is measured anew; without a writable folder every call measures.
    """
    kept = read(cache / FILE).get(machine(device, dtype))
    return kept or remember(cache, device, dtype, measure(device, dtype))


def remember(cache: Path, device: torch.device, dtype: torch.dtype, rate: float) -> float:
    """Keep the larger of `rate` and what is kept, for a busy machine measures too little; returns it."""
    rates, key = read(cache / FILE), machine(device, dtype)
    best = max(rate, rates.get(key, 0.0))
    write(cache / FILE, rates | {key: best})
    return best


def read(path: Path) -> dict[str, float]:
    """The rates kept in `path`; none when it is missing or damaged."""
    try:
        found = foreign.read_json(path)
        return {str(key): float(rate) for key, rate in found.items() if float(rate) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write(path: Path, rates: dict[str, float]) -> None:
    """Replace `path` in one step, or not at all where that is impossible: the cache is a convenience."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w") as file:
            json.dump(rates, file, indent=1)
        os.replace(temporary, path)
    except OSError:
        return


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked, so that a clock read afterwards counts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def cpu_name() -> str:
    """The processor's name, from /proc/cpuinfo on Linux, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
