"""What bounds the sparse products on a CPU: how fast its threads read their caches and multiply."""

import ctypes
from statistics import median
from time import perf_counter
from typing import NamedTuple

from ffnlab.kernels.build import library

L1_BYTES, L2_BYTES = 2**14, 2**19  # of a buffer that stays in either cache, with room for what else is there
WORK = 2**27  # bytes, and multiply-adds, of one trial on each thread
TRIALS = 5


class Limits(NamedTuple):
    """All threads together: bytes per second that stream from L1 and L2, fp32 operations per second (a
    multiply-add counts as two).
    """

    l1_bytes_per_s: float
    l2_bytes_per_s: float
    flop_per_s: float


def limits(threads: int) -> Limits:
    """Medians of `TRIALS` trials. Raises NoCompiler where there is no compiled backend."""
    return Limits(read(L1_BYTES, threads), read(L2_BYTES, threads), multiply_add(threads))


def read(size: int, threads: int) -> float:
    """Bytes per second of buffers of `size` bytes, one for each thread."""
    times = max(1, WORK // size)
    args = ctypes.c_int64(size // 4), ctypes.c_int64(times), ctypes.c_int(threads)
    return threads * size * times / seconds("limit_read", *args)


def multiply_add(threads: int) -> float:
    """Operations per second on registers."""
    numbers = 12 * library()["lanes"]()
    times = WORK // numbers
    args = ctypes.c_int64(times), ctypes.c_int(threads)
    return threads * 2 * numbers * times / seconds("limit_multiply_add", *args)


def seconds(name: str, *args: ctypes._SimpleCData) -> float:
    """The median time of a function of the library."""
    function = library()[name]
    function.restype = ctypes.c_float
    function(*args)
    found = []
    for _ in range(TRIALS):
        begin = perf_counter()
        function(*args)
        found.append(perf_counter() - begin)
    return median(found)
