"""Undefined memory: reads that matter are reported, reads that do not are not, results stay."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.emulator import EmulationError
from tile_kernels.emulator.lowering import SharedBuffer

from . import sample_kernels as k
from .helpers import cuda_source, fails, rand


def test_unused_undefined_values_are_no_failure() -> None:
    """A whole tile is read, but what was never written does not reach the result."""
    body = """
  __shared__ float s[64];
  if (threadIdx.x < 20) s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float mine[2];
  mine[0] = s[threadIdx.x];
  float v = mine[0] + mine[1];
  if (threadIdx.x < 20) y[threadIdx.x] = mine[0];
  if (v == 12345.f && threadIdx.x > 99) y[0] = v;
"""
    probe = cuda_source(body, {"x": "float", "y": "float"})
    x, y = rand(32), torch.zeros(32)
    report = probe(x, y)
    assert torch.equal(y, torch.cat([x[:20], torch.zeros(12)]))
    assert report.buffers is not None
    assert report.buffers["y"].written == 80  # of one run, though there were several


@pytest.mark.parametrize("index", [0, 31])
def test_the_read_that_matters_is_reported_among_harmless_ones(index: int) -> None:
    body = f"""
  __shared__ float s[64];
  float unused = s[threadIdx.x];
  if (unused == 12345.f) y[0] = 1;
  float used = s[32 + threadIdx.x];
  y[threadIdx.x] = threadIdx.x == {index} ? used : 0;
"""
    with pytest.raises(EmulationError, match="uninitialised: 4-byte read of shared s") as caught:
        cuda_source(body, {"y": "float"})(torch.zeros(32))
    assert caught.value.source_text == "float used = s[32 + threadIdx.x];"


def test_a_wild_index_is_named_by_its_cause() -> None:
    """Undefined bytes are -1 at first: the access is out of bounds only because of them."""
    body = "__shared__ int s[32];\nint i = s[threadIdx.x];\ny[i] = 1;"
    with pytest.raises(EmulationError) as caught:
        cuda_source(body, {"y": "int"})(torch.zeros(32, dtype=torch.int32))
    assert (caught.value.kind, caught.value.source_text) == (
        "uninitialised",
        "int i = s[threadIdx.x];",
    )
    body = "__shared__ int s[32];\ns[threadIdx.x] = 99;\nint i = s[threadIdx.x];\ny[i] = 1;"
    with pytest.raises(EmulationError, match="out of bounds: 4-byte write to y byte 396"):
        cuda_source(body, {"y": "int"})(torch.zeros(32, dtype=torch.int32))


def test_fresh_tensors() -> None:
    add = cuda_source("y[threadIdx.x] += x[threadIdx.x];", {"x": "float", "y": "float"})
    x, y = rand(32), torch.ones(32)
    add(x, y)
    assert torch.equal(y, x + 1)
    with pytest.raises(EmulationError, match="uninitialised: 4-byte read of y byte 0") as caught:
        add(x, y, fresh=["y"])
    assert caught.value.buffer == "y"
    with pytest.raises(ValueError, match="fresh: probe has no tensor z"):
        add(x, y, fresh=["z"])
    first = cuda_source(
        "y[threadIdx.x] = 2; y[threadIdx.x] += x[threadIdx.x];", {"x": "float", "y": "float"}
    )
    first(x, y, fresh=["y"])
    assert torch.equal(y, x + 2)


def test_a_copy_between_fresh_elements_is_a_result() -> None:
    probe = cuda_source("y[threadIdx.x] = y[32 + threadIdx.x];", {"y": "float"})
    with pytest.raises(EmulationError, match="uninitialised: 4-byte read of y byte 128"):
        probe(torch.zeros(64), fresh=["y"])


def test_partly_undefined_vector() -> None:
    body = """
  float v[8];
  for (int i = 0; i < 6; ++i) v[i] = x[i];
  *(float4*)(y + 4 * threadIdx.x) = *(float4*)(v + 4);
"""
    with pytest.raises(EmulationError, match="the thread's own v byte 16") as caught:
        cuda_source(body, {"x": "float", "y": "float"}, threads=2)(rand(8), torch.zeros(8))
    assert (caught.value.kind, caught.value.buffer) == ("uninitialised", "v")


@pytest.mark.parametrize("at", ["4", "-1", "4 + threadIdx.x", "-8"])
def test_bounds_of_local_arrays(at: str) -> None:
    body = f"  float v[4];\nv[0] = 1;\nv[{at}] = 2;\ny[threadIdx.x] = v[0];"
    with pytest.raises(EmulationError, match="write to the thread's own v byte") as caught:
        cuda_source(body, {"y": "float"})(torch.zeros(32))
    assert caught.value.kind == "out of bounds"
    assert caught.value.element == {"-1": -1, "-8": -8}.get(at, 4)
    assert caught.value.source_line is not None
    # The arrays that never went out of scope leave no traces.
    y = torch.zeros(32)
    cuda_source("  float w[40];\nw[7] = 3;\ny[threadIdx.x] = w[7];", {"y": "float"})(y)
    assert y.tolist() == [3.0] * 32


def test_undefined_accumulators_and_operands() -> None:
    """wgmma reads registers and tiles outside of the instrumented code."""
    a = rand(128, 128, dtype=torch.bfloat16)
    clears = r"*(float4*)(acc + (i * 4)) = make_float4"

    def forget(source: str) -> str:
        assert clears in source
        return source.replace(clears, "float4 unused = make_float4")

    c = torch.zeros(128, 128)
    error = fails("uninitialised", k.gemm(128, 128, 128), a, a, c, configs={}, transform=forget)
    assert error.buffer == "acc"
    assert error.python_text == "T.gemm(sa, sb, acc, transpose_B=trans_b)"


FENCES = """
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x]; s[threadIdx.x + 32] = 1;
  {before}
  __syncthreads();
  {after}
  if (threadIdx.x == 0) {{
    tl::tma_store(&y[0], &s[0], 256); tl::tma_store_arrive(); tl::tma_store_wait<0>();
  }}
"""
FENCE = "tl::fence_proxy_async();"


@pytest.mark.parametrize(
    ("before", "after", "right"),
    [(FENCE, "", True), ("", FENCE, True), ("", f"if (threadIdx.x == 0) {FENCE}", True),
     ("", "", False), (FENCE, "s[threadIdx.x] = 2; __syncthreads();", False)],
    ids=["writers", "readers", "one reader", "none", "too early"],
)  # fmt: skip
def test_fences_before_a_bulk_store(before: str, after: str, right: bool) -> None:
    text = FENCES.format(before=before, after=after)
    probe = cuda_source(text, {"x": "float", "y": "float"})
    if right:
        probe(rand(32), torch.zeros(64))
        return
    with pytest.raises(
        EmulationError, match="missing fence: a bulk store reads 256 bytes"
    ) as caught:
        probe(rand(32), torch.zeros(64))
    assert caught.value.other_text is not None
    assert caught.value.other_text.startswith("s[threadIdx.x] =")


def test_buffers_may_share_their_place_one_after_the_other() -> None:
    body = """
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
  void* a = ((void*)((char*)buf_dyn_shmem + 0));
  void* b = ((void*)((char*)buf_dyn_shmem + 64));
  int t = threadIdx.x;
  ((float*)a)[t] = x[t];
  __syncthreads();
  float v = ((float*)a)[31 - t];
  __syncthreads();
  ((float*)b)[t] = v;
  __syncthreads();
  y[t] = ((float*)b)[31 - t]{again};
"""
    shared = {"a": SharedBuffer(128, 32), "b": SharedBuffer(128, 32)}
    x, y = rand(32), torch.zeros(32)
    tensors = {"x": "float", "y": "float"}
    cuda_source(body.format(again=""), tensors, shared=shared)(x, y)
    assert torch.equal(x, y)
    late = cuda_source(body.format(again=" + ((float*)a)[t]"), tensors, shared=shared)
    with pytest.raises(EmulationError, match="overlap: 4-byte read of shared a byte") as caught:
        late(x, y)
    assert caught.value.kind == "shared memory"
    assert "whose bytes b has overwritten" in str(caught.value)


def test_results_of_the_first_run_are_returned() -> None:
    """Also where the launch was repeated, and for arguments that are read and written."""
    body = "__shared__ float s[32];\nif (s[threadIdx.x] == 7.f) y[0] = 9;\ny[threadIdx.x] += 1;"
    y = torch.zeros(32)
    cuda_source(body, {"y": "float"})(y)
    assert y.tolist() == [1.0] * 32
