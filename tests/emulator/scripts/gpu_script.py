"""A script as people write them for a GPU; nothing in it knows of the emulator."""

import argparse

import tilelang
import tilelang.language as T
import torch
from tilelang.profiler import do_bench


@tilelang.jit(out_idx=[-1])
def matmul(M, N, K, block_M, block_N, block_K):
    @T.prim_func
    def gemm(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        C: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float16")
            B_shared = T.alloc_shared((block_K, block_N), "float16")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return gemm


@tilelang.jit
def add(A, B, block: int = 64):
    N = T.const("N")
    A: T.Tensor[[N], "float32"]
    B: T.Tensor[[N], "float32"]
    C = T.empty([N], "float32")
    with T.Kernel(T.ceildiv(N, block), threads=64) as b:
        for i in T.Parallel(block):
            C[b * block + i] = A[b * block + i] + B[b * block + i]
    return C


def configs():
    return [{"rows": 64, "threads": 128}, {"rows": 32, "threads": 64}]


@tilelang.autotune(configs=configs())
@tilelang.jit(out_idx=[-1])
def scale(rows=None, threads=None):
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n, 64), "float32"), s: T.float32, B: T.Tensor((n, 64), "float32")):
        with T.Kernel(T.ceildiv(n, rows), threads=threads) as b:
            for i, j in T.Parallel(rows, 64):
                if b * rows + i < n:
                    B[b * rows + i, j] = A[b * rows + i, j] * s

    return kernel


@T.prim_func
def negate(x: T.Tensor((96,), "float32"), y: T.Tensor((96,), "float32")):
    with T.Kernel(3, threads=32) as b:
        for i in T.Parallel(32):
            y[b * 32 + i] = -x[b * 32 + i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--m", type=int, default=128)
    m = parser.parse_args().m
    assert torch.cuda.is_available()
    torch.cuda.manual_seed(0)

    kernel = matmul(m, 64, 64, 64, 64, 32)
    A = torch.randn(m, 64, device="cuda", dtype=torch.float16)
    B = torch.randn(64, 64).cuda().half()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    C = kernel(A, B)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    assert C.is_cuda
    torch.testing.assert_close(C, A @ B, rtol=1e-2, atol=1e-2)
    profiler = kernel.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal)
    profiler.assert_allclose(lambda a, b: a @ b, rtol=1e-2, atol=1e-2)
    print(f"latency {profiler.do_bench(warmup=500):.3f} ms, {do_bench(lambda: kernel(A, B)):.3f}")

    x, y = torch.randn(256, device="cuda"), torch.randn(256, device=torch.device("cuda"))
    torch.testing.assert_close(add(x, y), x + y)

    tuned = scale()
    X = torch.randn(100, 64, device="cuda")
    torch.testing.assert_close(tuned(X, 2.0), X * 2)
    print("config", tuned.config)

    v = torch.randn(96, device="cuda")
    w = torch.empty_like(v)
    tilelang.compile(negate, target="cuda")(v, w)
    torch.testing.assert_close(w, -v)
    print(f"All checks pass on {torch.cuda.get_device_name()}, m = {m}.")


if __name__ == "__main__":
    main()
