"""The GPU backend without a GPU: results under Triton's interpreter, machine code by its compiler."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ffnlab import kernels
from ffnlab.kernels import ops

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not made for this system")


def in_a_process(*args: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, *args], env=os.environ | env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@needs_triton
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_results(which: str):
    interpreted = str(int(not torch.cuda.is_available()))
    checks = str(Path(__file__).with_name("gpu_checks.py"))
    args = ("-m", "pytest", checks, "-q", "-x", "-m", which, "-n0", "-p", "no:cacheprovider")
    in_a_process(*args, TRITON_INTERPRET=interpreted)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ffnlab.kernels import gpu, gpu_kernels as programs

def build(program, kind, warps, **sizes):
    types = {
        **dict.fromkeys(("crow", "counts", "starts"), "*i64"), "idx": "*i32",
        **dict.fromkeys(("rows", "d_ff", "cols"), "i32"), **{name: "constexpr" for name in sizes},
    }
    types = {name: types.get(name, "*" + kind) for name in program.arg_names}
    by_16 = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name not in sizes}
    source = ASTSource(program, types, sizes, by_16)
    triton.compile(source, GPUTarget("cuda", 80, 32), {"num_warps": warps, "enable_fp_fusion": True})

for kind, bytes in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
    for program in (programs.spmm_kernel, programs.sddmm_kernel, programs.fold_kernel):
        build(program, kind, 1, ENTRIES=gpu.ENTRIES, BLOCK=gpu.LINE_BYTES // bytes)
    for program in (programs.count_kernel, programs.write_kernel):
        build(program, kind, 4, PER_NEURON=1, BLOCK=gpu.NEURONS)
"""


@needs_triton
@pytest.mark.slow
def test_programs_compile_for_a_gpu(tmp_path: Path):
    """The interpreter takes what the compiler refuses. To machine code of an A100, which needs no GPU."""
    in_a_process("-c", COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_precisions_and_systems_without_a_backend_are_told(monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda")
    assert "fp16" in str(kernels.unavailable(gpu, torch.float64))
    assert "mps" in str(kernels.unavailable(torch.device("mps"), torch.float32))
    assert (kernels.unavailable(gpu, torch.float16) is None) == HAS_TRITON
    ops.without_triton.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "Triton" in str(kernels.unavailable(gpu, torch.float32))
    ops.without_triton.cache_clear()
