"""Cooperation of blocks: atomics, barriers over the grid, flags, clusters, raw PTX."""

import tilelang
import tilelang.language as T
import torch

from . import case
from .gemm import close, randn

F32 = torch.float32


@case(quick=True)
def histogram_in_shared_memory():
    n, bins = 1000, 16

    @tilelang.jit
    def build():
        @T.prim_func
        def kernel(x: T.Tensor((n,), "int32"), counts: T.Tensor((bins,), "int32")):
            with T.Kernel(T.ceildiv(n, 256), threads=64) as b:
                t = T.get_thread_binding()
                here = T.alloc_shared((bins,), "int32")
                if t < bins:
                    here[t] = 0
                T.sync_threads()
                for i in T.serial(4):
                    at = b * 256 + i * 64 + t
                    if at < n:
                        T.atomic_add(here[x[at]], 1)
                T.sync_threads()
                if t < bins:
                    T.atomic_add(counts[t], here[t])

        return kernel

    x = torch.randint(0, bins, (n,), dtype=torch.int32, device="cuda")
    counts = torch.zeros(bins, dtype=torch.int32, device="cuda")
    build()(x, counts)
    assert torch.equal(counts.long(), torch.bincount(x, minlength=bins))


@case()
def grid_barrier_two_phases():
    blocks, width = 4, 64

    @T.prim_func
    def kernel(
        x: T.Tensor((blocks, width), "float32"), part: T.Tensor((blocks,), "float32"),
        y: T.Tensor((blocks, width), "float32"),
    ):  # fmt: skip
        with T.Kernel(blocks, threads=width) as b:
            t = T.get_thread_binding()
            tile = T.alloc_fragment((width,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(x[b, 0:width], tile)
            T.reduce_sum(tile, total, dim=0)
            if t == 0:
                part[b] = total[0]
            T.sync_grid()
            y[b, t] = x[b, t] / (part[0] + part[1] + part[2] + part[3])

    x = torch.rand(blocks, width, device="cuda")
    part = torch.zeros(blocks, device="cuda")
    y = torch.empty_like(x)
    tilelang.compile(kernel)(x, part, y)
    close(y, x / x.sum(), 1e-5, 1e-7)


@case()
def last_block_finishes():
    blocks, width = 6, 64

    @T.prim_func
    def kernel(
        x: T.Tensor((blocks * width,), "float32"), part: T.Tensor((blocks,), "float32"),
        arrived: T.Tensor((1,), "int32"), total: T.Tensor((1,), "float32"),
    ):  # fmt: skip
        with T.Kernel(blocks, threads=width) as b:
            t = T.get_thread_binding()
            tile = T.alloc_fragment((width,), "float32")
            value = T.alloc_fragment((1,), "float32")
            order = T.alloc_shared((1,), "int32")
            T.copy(x[b * width : b * width + width], tile)
            T.reduce_sum(tile, value, dim=0)
            if t == 0:
                part[b] = value[0]
                order[0] = T.atomic_add(arrived[0], 1, memory_order="acq_rel", return_prev=True)
            T.sync_threads()
            if order[0] == blocks - 1:
                if t == 0:
                    total[0] = 0
                    for i in T.serial(blocks):
                        total[0] += part[i]

    x = randn(blocks * width, dtype=F32)
    part, total = torch.zeros(blocks, device="cuda"), torch.zeros(1, device="cuda")
    tilelang.compile(kernel)(x, part, torch.zeros(1, dtype=torch.int32, device="cuda"), total)
    close(total[0], x.sum(), 1e-4, 1e-4)


def chained_sums(order):
    """Each block waits for the sum of its neighbour: a decoupled scan over blocks."""
    blocks, width = 5, 32

    @T.prim_func
    def kernel(
        x: T.Tensor((blocks, width), "int32"), carry: T.Tensor((blocks + 1,), "int32"),
        ready: T.Tensor((blocks + 1,), "int32"), y: T.Tensor((blocks, width), "int32"),
    ):  # fmt: skip
        with T.Kernel(blocks, threads=width) as b:
            t = T.get_thread_binding()
            me = b if order == "up" else blocks - 1 - b
            sums = T.alloc_shared((width,), "int32")
            seen = T.alloc_local((1,), "int32")
            sums[t] = x[me, t]
            T.sync_threads()
            T.cumsum(src=sums, dim=0)
            T.sync_threads()
            if t == 0:
                seen[0] = 0
                while seen[0] == 0:
                    seen[0] = T.atomic_load(ready[me], memory_order="acquire")
                carry[me + 1] = carry[me] + sums[width - 1]
                T.atomic_store(ready[me + 1], 1, memory_order="release")
            T.sync_threads()
            y[me, t] = carry[me] + sums[t]

    x = torch.randint(-9, 9, (blocks, width), dtype=torch.int32, device="cuda")
    carry = torch.zeros(blocks + 1, dtype=torch.int32, device="cuda")
    ready = torch.zeros(blocks + 1, dtype=torch.int32, device="cuda")
    ready[0] = 1
    y = torch.empty_like(x)
    tilelang.compile(kernel)(x, carry, ready, y)
    assert torch.equal(y.flatten(), x.flatten().cumsum(0).int())


@case()
def chained_scan_over_blocks():
    chained_sums("up")


@case(quick=True)
def blocks_wait_for_later_blocks():
    chained_sums("down")


@case()
def producer_and_consumer_warps():
    """Warp specialisation by hand: one warp group copies, the other computes, over mbarriers."""
    n, block, stages = 512, 128, 2

    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            buffer = T.alloc_shared((stages, block), "float32")
            full = T.alloc_barrier([128] * stages)
            empty = T.alloc_barrier([128] * stages)
            if t < 128:
                for i in T.serial(n // block):
                    T.barrier_wait(empty[i % stages], (i // stages + 1) % 2)
                    buffer[i % stages, t] = x[i * block + t]
                    T.barrier_arrive(full[i % stages])
            else:
                for i in T.serial(n // block):
                    T.barrier_wait(full[i % stages], (i // stages) % 2)
                    y[i * block + t - 128] = buffer[i % stages, t - 128] * 3
                    T.barrier_arrive(empty[i % stages])

    x = randn(n, dtype=F32)
    off = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}
    assert torch.equal(tilelang.compile(kernel, out_idx=-1, pass_configs=off)(x), x * 3)


@case()
def warp_votes_and_matches():
    n = 64

    @T.prim_func
    def kernel(x: T.Tensor((n,), "int32"), y: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=n):
            t = T.get_thread_binding()
            bits = T.alloc_local((1,), "uint32")
            bits[0] = T.call_extern("uint32", "__ballot_sync", T.uint32(0xFFFFFFFF), x[t] > 0)
            y[t] = T.popcount(bits[0])

    x = torch.randint(-5, 5, (n,), dtype=torch.int32, device="cuda")
    want = (x.view(2, 32) > 0).sum(1, dtype=torch.int32).repeat_interleave(32)
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x), want)


@case(quick=True)
def cluster_reduction():
    """Blocks of a cluster read each other's shared memory."""
    blocks, width, cluster = 4, 32, 2

    @T.prim_func
    def kernel(x: T.Tensor((blocks, width), "float32"), y: T.Tensor((blocks, width), "float32")):
        with T.Kernel(blocks, threads=width, cluster_dims=(cluster, 1, 1)) as b:
            t = T.get_thread_binding()
            mine = T.alloc_shared((width,), "float32")
            theirs = T.alloc_shared((width,), "float32")
            mine[t] = x[b, t]
            T.cluster_sync()
            T.copy_cluster(mine, theirs, dst_block=(b % cluster) ^ 1)
            T.cluster_sync()
            y[b, t] = mine[t] + theirs[t]

    x = randn(blocks, width, dtype=F32)
    pairs = x.view(blocks // cluster, cluster, width).sum(1).repeat_interleave(cluster, 0)
    close(tilelang.compile(kernel, out_idx=-1)(x), pairs, 1e-6, 1e-6)


@case(quick=True)
def multicast_copy():
    """A matrix product in which the copy engine loads B once for both blocks of a cluster."""
    M, N, K = 128, 64, 64

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        C: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(M // 64, threads=128, cluster_dims=(2, 1, 1)) as b:
            A_shared = T.alloc_shared((64, K), "float16")
            B_shared = T.alloc_shared((K, N), "float16")
            C_local = T.alloc_fragment((64, N), "float32")
            T.copy(A[b * 64, 0], A_shared)
            T.cluster_sync()  # the other block has made its barrier
            T.copy_cluster(B, B_shared, cluster_mask=3)
            T.clear(C_local)
            T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[b * 64, 0])

    a, b = randn(M, K), randn(K, N)
    close(tilelang.compile(kernel, out_idx=-1)(a, b), a @ b)


@case()
def cluster_push_with_barrier():
    """Each block of a pair sends a tile to the other, which waits on its own mbarrier."""
    blocks, width = 4, 128

    @T.prim_func
    def kernel(x: T.Tensor((blocks, width), "float32"), y: T.Tensor((blocks, width), "float32")):
        with T.Kernel(blocks, threads=width, cluster_dims=(2, 1, 1)) as b:
            t = T.get_thread_binding()
            mine = T.alloc_shared((width,), "float32")
            theirs = T.alloc_shared((width,), "float32")
            arrived = T.alloc_cluster_barrier([1])
            mine[t] = x[b, t]
            T.cluster_sync()
            T.copy_cluster(mine, theirs, dst_block=(b % 2) ^ 1, remote_barrier=arrived[0])
            T.barrier_wait(arrived[0], 0)
            y[b, t] = theirs[t]
            T.cluster_sync()

    x = randn(blocks, width, dtype=F32)
    want = x.view(blocks // 2, 2, width).flip(1).reshape(blocks, width)
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x), want)


PTX = """
__device__ __forceinline__ unsigned pick(unsigned a, unsigned b, unsigned c) {
  unsigned r;
  asm volatile("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ unsigned bytes(unsigned a, unsigned b) {
  unsigned r;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
"""


@case(quick=True)
def inline_ptx():
    n = 32

    @T.prim_func
    def kernel(x: T.Tensor((n,), "uint32"), y: T.Tensor((n,), "uint32")):
        with T.Kernel(1, threads=n):
            T.import_source(PTX)
            t = T.get_thread_binding()
            chosen = T.call_extern(
                "uint32", "pick", x[t], T.uint32(0x0000FFFF), T.uint32(0xABCD0000)
            )
            y[t] = T.call_extern("uint32", "bytes", chosen, x[t])

    x = torch.randint(0, 2**31, (n,), device="cuda").to(torch.uint32)
    a = x.long()
    chosen = (a & 0xFFFF) | (~a & 0xABCD0000)
    want = (chosen & 0xFFFF) | (a & 0xFFFF) << 16
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x).long(), want & 0xFFFFFFFF)
