"""Compiling ahead of time, and reading what the compiler made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tile_kernels
from tests.requirements import needs_nvcc, run_fresh
from tile_kernels.runtime import sources
from tile_kernels.runtime.device import arch_of_capability, described
from tile_kernels.runtime.warmup import benchmark_calls, compilations, tensor_of

CALL = ("moe.topk_gate", {"scores": "float32[128,40]", "num_topk": 3})


@needs_nvcc
def test_warmup_fills_the_disk_cache(tmp_path: Path) -> None:
    """In a fresh process a kernel compiled before is loaded, not compiled."""
    code = f"""
import tile_kernels
report = tile_kernels.warmup([{CALL!r}], arch="sm_89", progress=False)
(label, seconds), = report.kernels.items()
print(label, seconds)
"""
    times = []
    for _ in range(2):
        label, seconds = run_fresh(code, TILE_KERNELS_CACHE=str(tmp_path)).rsplit(" ", 1)
        assert label == "topk_gate_warp(40, 3, 4, 4)"
        times.append(float(seconds))
        assert len(list(tmp_path.rglob("*.kernel"))) == 1
    assert times[1] < times[0]


def test_equal_kernels_are_compiled_once() -> None:
    calls = [("moe.topk_gate", {"scores": f"float32[{n},64]", "num_topk": 4}) for n in (1, 9, 99)]
    assert len(compilations(calls, described())) == 1
    assert len(compilations(benchmark_calls(), described())) > 3


def test_real_tensors_count_by_shape() -> None:
    words = compilations([("transpose.transpose", {"x": "bfloat16[64,32:96,1]"})], described())
    tensor = torch.empty(64, 96, dtype=torch.bfloat16)[:, :32]
    assert compilations([("transpose.transpose", {"x": tensor})], described()) == words


def test_bad_calls_are_refused_before_compiling() -> None:
    with pytest.raises(ValueError, match=r"written like float32\[8192,256\], got 'fp32\[4\]'"):
        tensor_of("fp32[4]")
    with pytest.raises(ValueError, match=r"topk_gate: num_topk must be in 1\.\.64"):
        tile_kernels.warmup([("moe.topk_gate", {"scores": "float32[1,64]", "num_topk": 65})])
    with pytest.raises(ValueError, match="arch must be one of sm_80"):
        tile_kernels.warmup([CALL], arch="sm_75")


def test_architecture_names() -> None:
    names = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}
    assert {pair: arch_of_capability(*pair) for pair in names} == names


@needs_nvcc
def test_machine_code_is_read_back() -> None:
    """The reader sees what is there: narrow accesses and spills that we put in on purpose."""
    source = """
extern "C" __global__ void __launch_bounds__(1024) narrow(const short* x, short* y) {
  y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void wide(const uint4* x, uint4* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* x, float* y, int n) {
  float v[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; ++i) y[i * 1024 + threadIdx.x] = v[i] * v[95 - i] + v[(i * 7) % 96];
}
"""
    found = {f.name: f for f in sources.compile_source(source, "sm_90a")}
    assert found["narrow"].accesses == {"LDG.16": 1, "STG.16": 1}
    assert found["wide"].accesses == {"LDG.128": 1, "STG.128": 1}
    assert found["spills"].spill_bytes > 0
    assert any(name.startswith("LDL") for name in found["spills"].accesses)
    with pytest.raises(RuntimeError, match="nvcc failed for sm_90a"):
        sources.compile_source("this is not CUDA", "sm_90a")
