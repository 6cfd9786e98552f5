"""Classes of kernel bugs, each planted in a small kernel that is correct without it.

Every kernel is a function of `bug`. Where TileLang generates the faulty part itself (copies, waits,
fences, descriptors), the bug is an edit of the generated source instead. `BUGS` says for each what
the emulator must report: the kind, the words, and the text of the Python line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tilelang import language as T

from . import sample_kernels as k
from .helpers import rand, replace_nth

N = 64
MANUAL = {**k.NO_BARRIERS, k.CFG.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


def elementwise(body: Any, *, grid: int = 1, threads: int = N, size: int = N, out: int = N) -> Any:
    """A kernel over x (size floats) and y (out floats) whose body is a macro."""

    @T.prim_func
    def planted(x: T.Tensor[(size,), T.float32], y: T.Tensor[(out,), T.float32]):
        with T.Kernel(grid, threads=threads) as b:
            body(x, y, b, T.get_thread_binding())

    return planted


def off_by_one(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        y[t] = x[t + 1 if bug else t]

    return elementwise(body)


def global_write(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        y[t - 1 if bug else t] = x[t]

    return elementwise(body)


def shared_bounds(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        s = T.alloc_shared((N,), T.float32)
        s[t] = x[t]
        T.sync_threads()
        y[t] = s[N - t if bug else N - 1 - t]

    return elementwise(body)


def local_bounds(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        v = T.alloc_local((4,), T.float32)
        for i in T.serial(4):
            v[i + 1 if bug else i] = x[t]
        y[t] = v[2]

    return elementwise(body)


def wrong_grid(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        y[b * 32 + t] = x[b * 32 + t]

    return elementwise(body, grid=3 if bug else 2, threads=32)


def missing_barrier(bug: bool) -> Any:
    return k.reverse(N, sync=not bug)


def race_between_warps(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        part = T.alloc_shared((2,), T.float32)
        if t % 32 == 0:
            part[t // 32] = x[t]
        if bug:
            T.sync_warp()
        else:
            T.sync_threads()
        y[t] = part[0] + part[1]

    return elementwise(body)


def barrier_count(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        if t < 64:
            T.sync_threads(1, 96 if bug else 64)
        y[t] = x[t]

    return elementwise(body, threads=128, size=128, out=128)


def divergent_barrier(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        if t < (40 if bug else 64):
            T.sync_threads()
        y[t] = x[t]
        T.sync_threads()

    return elementwise(body)


def deadlock(bug: bool) -> Any:
    """Two warps that wait for each other's barrier before they arrive at their own."""

    @T.macro
    def body(x, y, b, t):
        bars = T.alloc_barrier([32, 32])
        if t < 32:
            if not bug:
                T.barrier_arrive(bars[0])
            T.barrier_wait(bars[1], 0)
            if bug:
                T.barrier_arrive(bars[0])
        else:
            T.barrier_wait(bars[0], 0)
            T.barrier_arrive(bars[1])
        y[t] = x[t]

    return elementwise(body)


def endless_loop(bug: bool) -> Any:
    """Waits for a flag that nobody sets."""

    @T.macro
    def body(x, y, b, t):
        if not bug:
            T.atomic_add(y[0], 1.0)
        while T.atomic_load(y[0]) < 1.0:
            T.evaluate(0)
        y[t + 1] = x[t]

    return elementwise(body, out=N + 1)


def wrong_phase(bug: bool) -> Any:
    n = 1

    @T.prim_func
    def phases(x: T.Tensor[(n, 256), T.bfloat16], y: T.Tensor[(n, 256), T.bfloat16]):
        with T.Kernel(n, threads=32) as b:
            s = T.alloc_shared((256,), T.bfloat16)
            bar = T.alloc_barrier(32)
            T.tma_copy(x[b, 0:256], s, barrier=bar)
            T.barrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 1 if bug else 0)
            for i in T.serial(8):
                y[b, i * 32 + T.get_thread_binding()] = s[i * 32 + T.get_thread_binding()]

    return phases


def double_write(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        y[t // 2 if bug else t] = x[t]

    return elementwise(body)


def missing_atomic(bug: bool) -> Any:
    return k.unguarded_counter(32, atomic=not bug)


def misaligned_vector(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        for i in T.vectorized(4):
            y[t * 4 + i] = x[t * 4 + i]

    return elementwise(body, threads=8)


def undefined_local(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        total = T.alloc_local((2,), T.float32)
        for i in T.serial(1 if bug else 2):
            total[i] = 0.0
        for i in T.serial(2):
            total[i] += x[t]
        y[t] = total[0] + total[1]

    return elementwise(body)


def undefined_shared(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        s = T.alloc_shared((N,), T.float32)
        if t < (N - 1 if bug else N):
            s[t] = x[t]
        T.sync_threads()
        y[t] = s[N - 1 - t]

    return elementwise(body)


def undefined_global(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        if not bug:
            y[t] = 0.0
        y[t] += x[t]

    return elementwise(body)


def generic_operand(bug: bool) -> Any:
    """Operands that the threads compute: wgmma reads what ordinary stores have written."""

    @T.prim_func
    def generic_operand(
        a: T.Tensor[(64, 64), T.bfloat16],
        b: T.Tensor[(64, 64), T.bfloat16],
        c: T.Tensor[(64, 64), T.float32],
    ):
        with T.Kernel(1, threads=128) as _:
            sa = T.alloc_shared((64, 64), T.bfloat16)
            sb = T.alloc_shared((64, 64), T.bfloat16)
            acc = T.alloc_fragment((64, 64), T.float32)
            for i, j in T.Parallel(64, 64):
                sa[i, j] = a[i, j] * T.bfloat16(2.0)
            for i, j in T.Parallel(64, 64):
                sb[i, j] = b[i, j] * T.bfloat16(2.0)
            T.clear(acc)
            T.gemm(sa, sb, acc, transpose_B=True)
            T.copy(acc, c, disable_tma=True)

    return generic_operand


def two_buffers(bug: bool) -> Any:
    @T.macro
    def body(x, y, b, t):
        s = T.alloc_shared((N,), T.float32)
        r = T.alloc_shared((N,), T.float32)
        s[t] = x[t]
        r[t] = x[t] * 2.0
        T.sync_threads()
        y[t] = s[N - 1 - t] + r[N - 1 - t]

    return elementwise(body)


def cluster_exchange(bug: bool) -> Any:
    """Each block of a pair writes a tile into the other's shared memory."""

    @T.prim_func
    def cluster_exchange(x: T.Tensor[(4, N), T.float32], y: T.Tensor[(4, N), T.float32]):
        with T.Kernel(4, threads=N, cluster_dims=(2, 1, 1)) as b:
            t = T.get_thread_binding()
            mine = T.alloc_shared((N,), T.float32)
            theirs = T.alloc_shared((N,), T.float32)
            mine[t] = x[b, t]
            T.cluster_sync()
            T.copy_cluster(mine, theirs, dst_block=(b % 2) ^ 1)
            if not bug:
                T.cluster_sync()
            y[b, t] = theirs[t]

    return cluster_exchange


def cluster_start(bug: bool) -> Any:
    """The second block of a pair writes to the first one, which has to have started."""

    @T.prim_func
    def cluster_start(x: T.Tensor[(4, N), T.float32], y: T.Tensor[(4, N), T.float32]):
        with T.Kernel(4, threads=N, cluster_dims=(2, 1, 1)) as b:
            t = T.get_thread_binding()
            mine = T.alloc_shared((N,), T.float32)
            theirs = T.alloc_shared((N,), T.float32)
            mine[t] = x[b, t]
            if not bug:
                T.cluster_sync()
            else:
                T.sync_threads()
            if b % 2 == 1:
                T.copy_cluster(mine, theirs, dst_block=0)
            T.cluster_sync()
            y[b, t] = mine[t]
            if b % 2 == 0:
                y[b, t] = theirs[t]

    return cluster_start


def cluster_end(bug: bool) -> Any:
    """A block may not end while the other block of its cluster still writes to it."""

    @T.prim_func
    def cluster_end(x: T.Tensor[(4, N), T.float32], y: T.Tensor[(4, N), T.float32]):
        with T.Kernel(4, threads=N, cluster_dims=(2, 1, 1)) as b:
            t = T.get_thread_binding()
            mine = T.alloc_shared((N,), T.float32)
            theirs = T.alloc_shared((N,), T.float32)
            mine[t] = x[b, t]
            T.cluster_sync()
            T.copy_cluster(mine, theirs, dst_block=(b % 2) ^ 1)
            y[b, t] = mine[t]
            if not bug:
                T.cluster_sync()

    return cluster_end


def sparse_product(bug: bool) -> Any:
    """A product with structured zeros, whose metadata a program computes wrongly."""

    @T.prim_func
    def sparse_product(
        a: T.Tensor[(64, 32), T.bfloat16],
        e: T.Tensor[(64, 4), T.int16],
        b: T.Tensor[(64, 64), T.bfloat16],
        c: T.Tensor[(64, 64), T.float32],
    ):
        with T.Kernel(1, threads=128) as _:
            sa = T.alloc_shared((64, 32), T.bfloat16)
            se = T.alloc_shared((64, 4), T.int16)
            sb = T.alloc_shared((64, 64), T.bfloat16)
            acc = T.alloc_fragment((64, 64), T.float32)
            T.copy(a, sa)
            T.copy(b, sb)
            for i, j in T.Parallel(64, 4):
                se[i, j] = e[i, j] if not bug else T.int16(0)
            T.clear(acc)
            T.gemm_sp(sa, se, sb, acc, transpose_B=True)
            T.copy(acc, c)

    return sparse_product


def register_pool(bug: bool) -> Any:
    """Of 3 x 128 threads with 168 registers each, two warpgroups want more than a third gives."""
    n, more = 384, 216 if bug else 208

    @T.macro
    def body(x, y, b, t):
        if t < 128:
            T.set_max_nreg(80, 0)
        else:
            T.set_max_nreg(more, 1)
        y[t] = x[t]

    return elementwise(body, threads=n, size=n, out=n)


# ---- the table -----------------------------------------------------------------------------------


def vectors(size: int = N, out: int = N) -> Callable[[], Sequence[Any]]:
    return lambda: (rand(size), torch.zeros(out))


def matrices(n: int) -> Callable[[], Sequence[Any]]:
    def make() -> Sequence[Any]:
        a = rand(n, n, dtype=torch.bfloat16)
        return a, a.clone(), torch.zeros(n, n)

    return make


def half_rows(rows: int, columns: int) -> Callable[[], Sequence[Any]]:
    return lambda: (
        rand(rows, columns, dtype=torch.bfloat16),
        torch.zeros(rows, columns, dtype=torch.bfloat16),
    )


def sparse_matrices() -> Sequence[Any]:
    """The second and the third of every four elements are stored: 0b1001, in each half byte."""
    stored = rand(64, 32, dtype=torch.bfloat16)
    places = torch.full((64, 4), 0x9999 - 0x10000, dtype=torch.int16)
    return stored, places, rand(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64)


def four_rows() -> Sequence[Any]:
    return rand(4, N), torch.zeros(4, N)


@dataclass(frozen=True)
class Bug:
    """`edit` changes the generated source of the faulty variant; `line` is in the Python line."""

    kernel: Callable[[bool], Any]
    args: Callable[[], Sequence[Any]]
    kind: str
    words: str
    line: str
    edit: Callable[[str], str] | None = None
    other_line: str | None = None
    configs: dict[Any, Any] = field(default_factory=lambda: dict(MANUAL))
    fresh: tuple[str, ...] = ()


BUGS = {
    "off-by-one bound": Bug(
        off_by_one, vectors(), "out of bounds", "4-byte read of x byte 256 (element 64)", "= x[t +"
    ),
    "write before a tensor": Bug(
        global_write, vectors(), "out of bounds", "4-byte write to y byte -4 (element -1)", "y[t -"
    ),
    "bound of a shared buffer": Bug(
        shared_bounds, vectors(), "out of bounds", "read of shared s byte 256", "= s[N - t if"
    ),
    "bound of a local array": Bug(
        local_bounds, vectors(), "out of bounds", "write to the thread's own v byte 16", "v[i + 1"
    ),
    "wrong grid": Bug(
        wrong_grid, vectors(), "out of bounds", "x byte 256", "y[b * 32 + t] ="
    ),
    "missing barrier": Bug(
        missing_barrier, vectors(), "race", "shared s byte", "s[t] = x[t]",
        other_line="y[t] = s[N - 1 - t]",
    ),
    "race between warps": Bug(
        race_between_warps, vectors(), "race", "with no barrier in between", "part[t // 32] = x[t]",
        other_line="y[t] = part[0]",
    ),
    "wrong barrier count": Bug(
        barrier_count, vectors(128, 128), "deadlock", "barrier 1 has 64 of 96", "T.sync_threads(1"
    ),
    "divergent barrier": Bug(
        divergent_barrier, vectors(), "divergence", "lanes of warp 1 meet barrier 0", "T.sync_th"
    ),
    "deadlock": Bug(
        deadlock, vectors(), "deadlock", "lacks 32 of 32 arrivals", "T.barrier_wait(bars["
    ),
    "endless loop": Bug(
        endless_loop, vectors(N, N + 1), "deadlock", "no progress", "while T.atomic_load(y"
    ),
    "missing mbarrier wait": Bug(
        lambda _: k.tma_copy(70, 136), half_rows(70, 136), "race",
        "the target of an asynchronous copy of thread 0 not yet waited for", "T.copy(s, y[",
        edit=lambda s: s.replace("x_to_s_mbarrier[0].wait(0);", ""),
        other_line="T.copy(x[by * 32", configs=k.PLAIN,
    ),
    "wrong phase": Bug(
        wrong_phase, half_rows(1, 256), "race", "with no barrier in between",
        "T.tma_copy(x[b, 0:256]", other_line="y[b, i * 32",
    ),
    "missing cp.async wait": Bug(
        lambda _: k.gemm(128, 128, 128), matrices(128), "race",
        "the target of an asynchronous copy", "T.gemm(sa, sb", configs={},
        edit=replace_nth(r"tl::cp_async_wait<\d>\(\);", 0), other_line="T.copy(a[by * bm",
    ),
    "bytes of a tensor copy": Bug(
        lambda _: k.tma_copy(70, 136), half_rows(70, 136), "deadlock",
        "lacks 0 of 1 arrivals and 4096 bytes", "T.copy(x[by * 32", configs=k.PLAIN,
        edit=lambda s: s.replace("expect_tx(4096)", "expect_tx(8192)"),
    ),
    "missing fence": Bug(
        generic_operand, matrices(64), "fence",
        "a wgmma reads 16 bytes of shared sa byte 0", "T.gemm(sa, sb", configs=k.PLAIN,
        edit=lambda s: s.replace("tl::fence_proxy_async();", ""), other_line="sa[i, j] = a[i, j]",
    ),
    "missing fence after cp.async": Bug(
        lambda _: k.gemm(128, 128, 128), matrices(128), "fence",
        "a wgmma reads 16 bytes of shared sa byte 0", "T.gemm(sa, sb", configs={},
        edit=lambda s: s.replace("tl::fence_proxy_async();", ""), other_line="T.copy(a[by * bm",
    ),
    "missing cluster barrier": Bug(
        cluster_exchange, four_rows, "race", "with no cluster barrier in between",
        "y[b, t] = theirs[t]", other_line="T.copy_cluster(mine, theirs", configs=k.PLAIN,
    ),
    "start of a block in use": Bug(
        cluster_start, four_rows, "race", "of the cluster, which may not have started",
        "T.copy_cluster(mine, theirs", configs=k.PLAIN,
    ),
    "end of a block in use": Bug(
        cluster_end, four_rows, "race", "the block ends although another block",
        "T.copy_cluster(mine, theirs", configs=k.PLAIN,
    ),
    "metadata of a sparse product": Bug(
        sparse_product, sparse_matrices, "metadata",
        "the metadata 0x0 of row 0, elements 0 to 3", "T.gemm_sp(sa, se", configs=k.PLAIN,
    ),
    "registers of warpgroups": Bug(
        register_pool, vectors(384, 384), "deadlock",
        "waits for 216 registers per thread and has 168; the block has 384 x 168 = 64512",
        "T.set_max_nreg(more, 1)",
    ),
    "uninitialised local array": Bug(
        undefined_local, vectors(), "uninitialised",
        "read of the thread's own total byte 4 (element 1)", "total[i] += x[t]",
    ),
    "uninitialised shared memory": Bug(
        undefined_shared, vectors(), "uninitialised", "read of shared s byte 252 (element 63)",
        "y[t] = s[N - 1 - t]",
    ),
    "uninitialised global memory": Bug(
        undefined_global, vectors(), "uninitialised", "read of y byte 0 (element 0)",
        "y[t] += x[t]", fresh=("y",),
    ),
    "overlapping shared buffers": Bug(
        two_buffers, vectors(), "shared memory",
        "read of shared r byte 0 (element 0), whose bytes s has overwritten", "s[N - 1 - t] + r",
        edit=lambda s: s.replace("buf_dyn_shmem + 256", "buf_dyn_shmem + 128"),
    ),
    "swizzle": Bug(
        lambda _: k.gemm(128, 128, 128, tma=True), matrices(128), "layout",
        "a wgmma reads shared sa", "T.gemm(sa, sb", other_line="T.copy(a[by * bm", configs={},
        edit=lambda s: s.replace("wgmma_descriptor<2,", "wgmma_descriptor<1,"),
    ),
    "double write": Bug(
        double_write, vectors(), "race", "(different values)", "y[t // 2 if bug"
    ),
    "missing atomic": Bug(
        missing_atomic, lambda: (torch.zeros(1, dtype=torch.int32),), "race",
        "read of y byte 0 (element 0), written by thread 0", "y[0] = y[0] + 1",
    ),
    "misaligned vector": Bug(
        misaligned_vector, lambda: (rand(N + 1)[1:], torch.zeros(N)), "misaligned",
        "16-byte read of x byte 0", "= x[t * 4 + i]",
    ),
}  # fmt: skip
