"""Tests as people write them for a GPU; collected by name with `pytest --emulate`."""

import pytest
import tilelang
import tilelang.language as T
import tilelang.testing
import torch


@tilelang.jit(out_idx=-1)
def double(n):
    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as b:
            for i in T.Parallel(64):
                y[b * 64 + i] = x[b * 64 + i] * 2

    return kernel


@tilelang.testing.requires_cuda
@tilelang.testing.requires_cuda_compute_version_ge(9, 0)
@pytest.mark.parametrize("n", [64, 100])
def test_double(n):
    x = torch.randn(n, device="cuda")
    torch.testing.assert_close(double(n)(x), 2 * x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_missing_barrier():
    @T.prim_func
    def reverse(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            tile = T.alloc_shared((64,), "float32")
            tile[t] = x[t]
            y[t] = tile[63 - t]

    off = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}
    kernel = tilelang.compile(reverse, pass_configs=off)
    kernel(torch.randn(64, device="cuda"), torch.empty(64, device="cuda"))
