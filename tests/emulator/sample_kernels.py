"""TileLang kernels for the emulator's tests: correct ones, and some with planted bugs.

Every function returns a prim_func; `PLAIN` are the pass configs most of them are lowered with.
(No `from __future__ import annotations` here: TileLang reads the annotations as values.)
"""

from typing import Any

import tilelang
from tilelang import language as T

CFG = tilelang.PassConfigKey
PLAIN = {CFG.TL_DISABLE_WARP_SPECIALIZED: True}
NO_GUARDS = {**PLAIN, CFG.TL_DISABLE_SAFE_MEMORY_ACCESS: True}
NO_BARRIERS = {**PLAIN, CFG.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def cast_e4m3(H: int, G: int, rows: int, threads: int, vec: int) -> Any:
    n = T.dynamic("n")
    cols = threads * vec // rows

    @T.prim_func
    def cast_e4m3(
        x: T.Tensor[(n, H), T.bfloat16],
        o: T.Tensor[(n, H), T.float8_e4m3fn],
        sf: T.Tensor[(n, H // G), T.float32],
    ):
        with T.Kernel(T.ceildiv(n, rows), H // cols, threads=threads) as (bx, by):
            f = T.alloc_fragment((rows, cols // G, G), T.float32)
            a = T.alloc_fragment((rows, cols // G), T.float32)
            for i, g, j in T.Parallel(rows, cols // G, G):
                f[i, g, j] = x[bx * rows + i, by * cols + g * G + j]
            T.reduce_absmax(f, a, dim=2)
            for i, g in T.Parallel(rows, cols // G):
                a[i, g] = T.max(a[i, g], 1e-4)
            for i, g, j in T.Parallel(rows, cols // G, G):
                o[bx * rows + i, by * cols + g * G + j] = T.cast(
                    f[i, g, j] * (448.0 / a[i, g]), T.float8_e4m3fn
                )
            for i, g in T.Parallel(rows, cols // G):
                sf[bx * rows + i, by * (cols // G) + g] = a[i, g] / 448.0

    return cast_e4m3


def linked_list(N: int) -> Any:
    """Every thread follows a list from its own entry to a negative one (lower with NO_GUARDS)."""

    @T.prim_func
    def linked_list(following: T.Tensor[(N,), T.int32], last: T.Tensor[(N,), T.int32]):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            entry = T.alloc_local((1,), T.int32)
            entry[0] = t
            while following[entry[0]] >= 0:
                entry[0] = following[entry[0]]
            last[t] = entry[0]

    return linked_list


def warp_topk(E: int, K: int, warps: int = 4) -> Any:
    """Each warp selects the top K of E scores by rounds of arg-max; ties go to the lowest index."""
    n = T.dynamic("n")
    per = E // 32

    @T.prim_func
    def warp_topk(
        s: T.Tensor[(n, E), T.float32],
        idx: T.Tensor[(n, K), T.int64],
        val: T.Tensor[(n, K), T.float32],
    ):
        with T.Kernel(T.ceildiv(n, warps), threads=32 * warps) as bx:
            tid = T.get_thread_binding()
            lane = tid % 32
            row = bx * warps + tid // 32
            v = T.alloc_local((per,), T.float32)
            bv = T.alloc_var(T.float32)
            bi = T.alloc_var(T.int32)
            ov = T.alloc_var(T.float32)
            oi = T.alloc_var(T.int32)
            if row < n:
                for i in T.unroll(per):
                    v[i] = s[row, i * 32 + lane]
                for k in T.serial(K):
                    bv = v[0]
                    bi = lane
                    for i in T.unroll(1, per):
                        if v[i] > bv:
                            bv = v[i]
                            bi = i * 32 + lane
                    for st in T.unroll(5):
                        ov = T.shfl_xor(bv, 16 >> st)
                        oi = T.shfl_xor(bi, 16 >> st)
                        if (ov > bv) or ((ov == bv) and (oi < bi)):
                            bv = ov
                            bi = oi
                    if lane == 0:
                        idx[row, k] = T.cast(bi, T.int64)
                        val[row, k] = bv
                    for i in T.unroll(per):
                        if i * 32 + lane == bi:
                            v[i] = -T.infinity(T.float32)

    return warp_topk


def transpose(tile: int = 32, threads: int = 128) -> Any:
    m, n = T.dynamic("m n")

    @T.prim_func
    def transpose(x: T.Tensor[(m, n), T.bfloat16], y: T.Tensor[(n, m), T.bfloat16]):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), threads=threads) as (bx, by):
            s = T.alloc_shared((tile, tile + 1), T.bfloat16)
            for i, j in T.Parallel(tile, tile):
                s[i, j] = x[by * tile + i, bx * tile + j]
            for i, j in T.Parallel(tile, tile):
                y[bx * tile + i, by * tile + j] = s[j, i]

    return transpose


def histogram(E: int, threads: int = 256, per: int = 4) -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def histogram(ids: T.Tensor[(n,), T.int32], out: T.Tensor[(E,), T.int32]):
        with T.Kernel(T.ceildiv(n, threads * per), threads=threads) as bx:
            tid = T.get_thread_binding()
            h = T.alloc_shared((E,), T.int32, scope="shared")
            for i in T.serial(T.ceildiv(E, threads)):
                if i * threads + tid < E:
                    h[i * threads + tid] = 0
            T.sync_threads()
            for i in T.serial(per):
                p = (bx * per + i) * threads + tid
                if p < n:
                    T.atomic_add(h[ids[p]], 1)
            T.sync_threads()
            for i in T.serial(T.ceildiv(E, threads)):
                if i * threads + tid < E:  # noqa: SIM102 (`and` could read past the end)
                    if h[i * threads + tid] != 0:
                        T.atomic_add(out[i * threads + tid], h[i * threads + tid])

    return histogram


def pipelined_rowsum(N: int, block: int = 256, stages: int = 3, threads: int = 128) -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def pipelined_rowsum(
        x: T.Tensor[(m, N), T.float32], w: T.Tensor[(N,), T.float32], y: T.Tensor[(m,), T.float32]
    ):
        with T.Kernel(T.ceildiv(m, 8), threads=threads) as bx:
            xs = T.alloc_shared((8, block), T.float32)
            ws = T.alloc_shared((block,), T.float32)
            acc = T.alloc_fragment((8, block), T.float32)
            r = T.alloc_fragment((8,), T.float32)
            T.clear(acc)
            for k in T.Pipelined(N // block, num_stages=stages):
                T.copy(x[bx * 8, k * block], xs, disable_tma=True)
                T.copy(w[k * block], ws, disable_tma=True)
                for i, j in T.Parallel(8, block):
                    acc[i, j] += xs[i, j] * ws[j]
            T.reduce_sum(acc, r, dim=1)
            for i in T.Parallel(8):
                if bx * 8 + i < m:
                    y[bx * 8 + i] = r[i]

    return pipelined_rowsum


def gemm(
    M: int,
    N: int,
    K: int,
    *,
    bm: int = 64,
    bn: int = 64,
    bk: int = 32,
    dtype: str = "bfloat16",
    acc_dtype: str = "float32",
    stages: int = 2,
    trans_b: bool = True,
    tma: bool = False,
) -> Any:
    no_tma = {} if tma else {"disable_tma": True}
    b_shape = (N, K) if trans_b else (K, N)
    sb_shape = (bn, bk) if trans_b else (bk, bn)

    @T.prim_func
    def gemm(
        a: T.Tensor[(M, K), dtype], b: T.Tensor[b_shape, dtype], c: T.Tensor[(M, N), acc_dtype]
    ):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
            sa = T.alloc_shared((bm, bk), dtype)
            sb = T.alloc_shared(sb_shape, dtype)
            acc = T.alloc_fragment((bm, bn), acc_dtype)
            T.clear(acc)
            for k in T.Pipelined(K // bk, num_stages=stages):
                T.copy(a[by * bm, k * bk], sa, **no_tma)
                if trans_b:
                    T.copy(b[bx * bn, k * bk], sb, **no_tma)
                else:
                    T.copy(b[k * bk, bx * bn], sb, **no_tma)
                T.gemm(sa, sb, acc, transpose_B=trans_b)
            T.copy(acc, c[by * bm, bx * bn], disable_tma=True)

    return gemm


def gemm_a_in_registers(M: int, N: int, K: int) -> Any:
    @T.prim_func
    def gemm_rs(
        a: T.Tensor[(M, K), T.bfloat16],
        b: T.Tensor[(N, K), T.bfloat16],
        c: T.Tensor[(M, N), T.float32],
    ):
        with T.Kernel(1, threads=128) as _:
            fa = T.alloc_fragment((M, K), T.bfloat16)
            sb = T.alloc_shared((N, K), T.bfloat16)
            acc = T.alloc_fragment((M, N), T.float32)
            T.copy(a, fa, disable_tma=True)
            T.copy(b, sb, disable_tma=True)
            T.clear(acc)
            T.gemm(fa, sb, acc, transpose_B=True)
            T.copy(acc, c, disable_tma=True)

    return gemm_rs


def gemm_stmatrix(M: int, N: int, K: int) -> Any:
    """The result leaves through shared memory, which TileLang writes with stmatrix."""

    @T.prim_func
    def gemm_stmatrix(
        a: T.Tensor[(M, K), T.bfloat16],
        b: T.Tensor[(N, K), T.bfloat16],
        c: T.Tensor[(M, N), T.bfloat16],
    ):
        with T.Kernel(1, threads=128) as _:
            sa = T.alloc_shared((M, K), T.bfloat16)
            sb = T.alloc_shared((N, K), T.bfloat16)
            sc = T.alloc_shared((M, N), T.bfloat16)
            acc = T.alloc_fragment((M, N), T.float32)
            T.copy(a, sa, disable_tma=True)
            T.copy(b, sb, disable_tma=True)
            T.clear(acc)
            T.gemm(sa, sb, acc, transpose_B=True)
            T.copy(acc, sc)
            T.copy(sc, c, disable_tma=True)

    return gemm_stmatrix


def softmax(N: int, threads: int = 128) -> Any:
    m = T.dynamic("m")

    @T.prim_func
    def softmax(x: T.Tensor[(m, N), T.bfloat16], y: T.Tensor[(m, N), T.float32]):
        with T.Kernel(m, threads=threads) as bx:
            f = T.alloc_fragment((N,), T.float32)
            mx = T.alloc_fragment((1,), T.float32)
            sm = T.alloc_fragment((1,), T.float32)
            for i in T.Parallel(N):
                f[i] = x[bx, i]
            T.reduce_max(f, mx, dim=0)
            for i in T.Parallel(N):
                f[i] = T.exp(f[i] - mx[0])
            T.reduce_sum(f, sm, dim=0)
            for i in T.Parallel(N):
                y[bx, i] = f[i] / sm[0]

    return softmax


def grid_sum(N: int, blocks: int = 4, threads: int = 128) -> Any:
    """Partial sums, grid barrier, every block reads all partials."""

    @T.prim_func
    def grid_sum(
        x: T.Tensor[(N,), T.int32],
        part: T.Tensor[(blocks,), T.int32],
        out: T.Tensor[(blocks,), T.int32],
    ):
        with T.Kernel(blocks, threads=threads) as bx:
            f = T.alloc_fragment((N // blocks,), T.int32)
            r = T.alloc_fragment((1,), T.int32)
            for i in T.Parallel(N // blocks):
                f[i] = x[bx * (N // blocks) + i]
            T.reduce_sum(f, r, dim=0)
            part[bx] = r[0]
            T.sync_grid()
            tot = T.alloc_var(T.int32)
            tot = 0
            for i in T.serial(blocks):
                tot += part[i]
            out[bx] = tot

    return grid_sum


def count_and_offsets(E: int, threads: int) -> Any:
    """Two kernels in one prim_func: warp-aggregated counts with match, then an exclusive scan."""
    n = T.dynamic("n")

    @T.prim_func
    def count_and_offsets(
        ids: T.Tensor[(n,), T.int32],
        cnt: T.Tensor[(E,), T.int32],
        off: T.Tensor[(E,), T.int32],
        rank: T.Tensor[(n,), T.int32],
    ):
        with T.Kernel(T.ceildiv(n, threads), threads=threads) as b:
            tx = T.get_thread_binding()
            s = T.alloc_shared((E,), T.int32)
            T.clear(s)
            e = T.alloc_var(T.int32, init=-1)
            i = b * threads + tx
            if i < n:
                e = ids[i]
            T.sync_threads()
            peers = T.match_any_sync(e)
            mine = (T.uint32(1) << T.cast(tx % 32, T.uint32)) - T.uint32(1)
            lower = T.popcount(peers & mine)
            base = T.alloc_var(T.int32, init=0)
            if e >= 0:  # noqa: SIM102
                if T.cast(lower, T.int32) == 0:
                    base = T.atomic_add(s[e], T.cast(T.popcount(peers), T.int32), return_prev=True)
            base = T.shfl_sync(base, T.__ffs(T.cast(peers, T.int32)) - 1)
            if i < n:
                rank[i] = base + T.cast(lower, T.int32)
            T.sync_threads()
            for k in T.Parallel(E):
                if s[k] > 0:
                    T.atomic_add(cnt[k], s[k])
        with T.Kernel(1, threads=E) as _:
            t = T.alloc_shared((E,), T.int32)
            T.copy(cnt, t)
            T.cumsum(t, dim=0)
            for k in T.Parallel(E):
                off[k] = t[k] - cnt[k]

    return count_and_offsets


def tma_copy(M: int, N: int) -> Any:
    """Tensor-map load and store of a 32 x 64 tile, 128-byte swizzle, ragged edges."""

    @T.prim_func
    def tma_copy(x: T.Tensor[(M, N), T.bfloat16], y: T.Tensor[(M, N), T.bfloat16]):
        with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 32), threads=128) as (bx, by):
            s = T.alloc_shared((32, 64), T.bfloat16)
            T.copy(x[by * 32, bx * 64], s, prefer_instruction="tma")
            T.copy(s, y[by * 32, bx * 64])

    return tma_copy


def bulk_copy(H: int) -> Any:
    """One bulk load and one bulk store per row, with an explicit mbarrier."""
    n = T.dynamic("n")

    @T.prim_func
    def bulk_copy(x: T.Tensor[(n, H), T.bfloat16], y: T.Tensor[(n, H), T.bfloat16]):
        with T.Kernel(n, threads=32) as b:
            s = T.alloc_shared((H,), T.bfloat16)
            bar = T.alloc_barrier(32)
            T.tma_copy(x[b, 0:H], s, barrier=bar)
            T.barrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)
            T.tma_copy(s, y[b, 0:H])
            T.tma_store_wait()

    return bulk_copy


def scan(n: int, *, reverse: bool = False) -> Any:
    @T.prim_func
    def scan(x: T.Tensor[(n,), T.float32], y: T.Tensor[(n,), T.float32]):
        with T.Kernel(1, threads=128) as _:
            s = T.alloc_shared((n,), T.float32)
            T.copy(x, s, disable_tma=True)
            T.cumsum(s, dim=0, reverse=reverse)
            T.copy(s, y, disable_tma=True)

    return scan


def elementwise(n: int, src: str, dst: str, body: Any) -> Any:
    """y[i] = body(x[i]), a vectorised loop."""

    @T.prim_func
    def elementwise(x: T.Tensor[(n,), src], y: T.Tensor[(n,), dst]):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(n):
                y[i] = body(x[i])

    return elementwise


def reduce_rows(m: int, n: int, dtype: str = "float32") -> Any:
    @T.prim_func
    def reduce_rows(
        x: T.Tensor[(m, n), dtype], total: T.Tensor[(m,), dtype], least: T.Tensor[(m,), dtype]
    ):
        with T.Kernel(1, threads=256) as _:
            f = T.alloc_fragment((m, n), dtype)
            r = T.alloc_fragment((m,), dtype)
            q = T.alloc_fragment((m,), dtype)
            T.copy(x, f, disable_tma=True)
            T.reduce_sum(f, r, dim=1)
            T.reduce_min(f, q, dim=1)
            T.copy(r, total, disable_tma=True)
            T.copy(q, least, disable_tma=True)

    return reduce_rows


def absmax_rows(n: int, dtype: str) -> Any:
    """Packed 16-bit abs2 and max2 in the thread, then an AllReduce."""
    m = T.dynamic("m")

    @T.prim_func
    def absmax_rows(x: T.Tensor[(m, n), dtype], y: T.Tensor[(m,), dtype]):
        with T.Kernel(m, threads=64) as b:
            f = T.alloc_fragment((n,), dtype)
            r = T.alloc_fragment((1,), dtype)
            T.copy(x[b, 0], f, disable_tma=True)
            T.reduce_absmax(f, r, dim=0)
            y[b] = r[0]

    return absmax_rows


def atomics(dtype: str) -> Any:
    @T.prim_func
    def atomics(
        x: T.Tensor[(256,), dtype],
        total: T.Tensor[(1,), dtype],
        most: T.Tensor[(1,), dtype],
        pairs: T.Tensor[(2,), dtype],
    ):
        with T.Kernel(2, threads=64) as b:
            t = T.get_thread_binding()
            T.atomic_add(total[0], x[b * 64 + t])
            T.atomic_max(most[0], x[b * 64 + t])
            T.atomic_addx2(pairs[0], x[(b * 64 + t) * 2])

    return atomics


def atomic_quads() -> Any:
    @T.prim_func
    def atomic_quads(x: T.Tensor[(256,), T.float32], z: T.Tensor[(4,), T.float32]):
        with T.Kernel(2, threads=32) as b:
            t = T.get_thread_binding()
            T.atomic_addx4(z[0], x[(b * 32 + t) * 4])

    return atomic_quads


def swizzled_grid(rows: int, cols: int, panel: int, order: str, cluster: int) -> Any:
    dims = None if cluster == 1 else (cluster, 1, 1)

    @T.prim_func
    def swizzled_grid(y: T.Tensor[(rows, cols), T.int32]):
        with T.Kernel(cols, rows, threads=32, cluster_dims=dims) as (bx, by):
            T.use_swizzle(panel, order=order)
            y[by, bx] = by * 100 + bx

    return swizzled_grid


def fp4_round_trip(n: int, src: str) -> Any:
    @T.prim_func
    def fp4_round_trip(
        x: T.Tensor[(n,), src],
        packed: T.Tensor[(n,), T.float4_e2m1fn],
        y: T.Tensor[(n,), T.float32],
    ):
        with T.Kernel(1, threads=32) as _:
            f = T.alloc_fragment((n,), T.float4_e2m1fn)
            for i in T.Parallel(n):
                f[i] = T.cast(x[i], T.float4_e2m1fn)
            for i in T.Parallel(n):
                packed[i] = f[i]
            for i in T.Parallel(n):
                y[i] = T.cast(f[i], T.float32)

    return fp4_round_trip


def fp4_widen(n: int) -> Any:
    @T.prim_func
    def fp4_widen(
        packed: T.Tensor[(n,), T.float4_e2m1fn],
        b: T.Tensor[(n,), T.bfloat16],
        q: T.Tensor[(n,), T.float8_e4m3fn],
        h: T.Tensor[(n,), T.float16],
    ):
        with T.Kernel(1, threads=32) as _:
            s = T.alloc_shared((n,), T.float4_e2m1fn)
            T.copy(packed, s)
            for i in T.Parallel(n):
                b[i] = T.cast(s[i], T.bfloat16)
            for i in T.Parallel(n):
                q[i] = T.cast(s[i], T.float8_e4m3fn)
            for i in T.Parallel(n):
                h[i] = T.cast(s[i], T.float16)

    return fp4_widen


def fp4_rows(H: int) -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def fp4_rows(packed: T.Tensor[(n, H), T.float4_e2m1fn], y: T.Tensor[(n, H), T.float32]):
        with T.Kernel(n, threads=32) as i:
            for j in T.Parallel(H):
                y[i, j] = T.cast(packed[i, j], T.float32)

    return fp4_rows


def scale_rows(H: int, *, with_bias: bool) -> Any:
    """Strided input, optional tensor, scalar argument."""
    n, s0 = T.dynamic("n s0")

    @T.prim_func
    def scale_rows(
        x: T.StridedTensor[(n, H), (s0, 1), T.float32],
        bias: T.Tensor[(H,), T.float32],
        y: T.Tensor[(n, H), T.float32],
        alpha: T.float32,
    ):
        with T.Kernel(n, threads=32) as i:
            for j in T.Parallel(H):
                v = x[i, j] * alpha
                if with_bias:
                    v = v + bias[j]
                y[i, j] = v

    return scale_rows


def weighted_rows(H: int) -> Any:
    """A multiply that feeds an add: the case in which contraction changes bits."""
    n = T.dynamic("n")

    @T.prim_func
    def weighted_rows(
        x: T.Tensor[(n, H), T.float32], w: T.Tensor[(H,), T.float32], y: T.Tensor[(n,), T.float32]
    ):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            t = T.get_thread_binding()
            i = b * 32 + t
            if i < n:
                acc = T.alloc_var(T.float32, init=0.0)
                for j in T.serial(H):
                    acc = acc + x[i, j] * w[j]
                y[i] = acc

    return weighted_rows


# ---- planted bugs ------------------------------------------------------------------------------


def shifted_copy(N: int, read: int, write: int) -> Any:
    """y[i] = x[i], with the read or the write moved past the end (lower with NO_GUARDS)."""

    @T.prim_func
    def shifted_copy(x: T.Tensor[(N,), T.float32], y: T.Tensor[(N,), T.float32]):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            y[t + write] = x[t + read]

    return shifted_copy


def reverse(N: int, *, sync: bool) -> Any:
    """Reverses a vector through shared memory; a data race without the barrier (NO_BARRIERS)."""

    @T.prim_func
    def reverse(x: T.Tensor[(N,), T.float32], y: T.Tensor[(N,), T.float32]):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            s = T.alloc_shared((N,), T.float32)
            s[t] = x[t]
            if sync:
                T.sync_threads()
            y[t] = s[N - 1 - t]

    return reverse


def write_one_cell(n: int) -> Any:
    """All threads of all blocks write y[0]: a race unless the values agree."""

    @T.prim_func
    def write_one_cell(x: T.Tensor[(n,), T.float32], y: T.Tensor[(1,), T.float32]):
        with T.Kernel(n // 32, threads=32) as b:
            t = T.get_thread_binding()
            y[0] = x[b * 32 + t]

    return write_one_cell


def neighbour_sum(n: int) -> Any:
    """Each block adds what its left neighbour wrote: blocks race."""

    @T.prim_func
    def neighbour_sum(x: T.Tensor[(n,), T.float32], y: T.Tensor[(n,), T.float32]):
        with T.Kernel(n // 32, threads=32) as b:
            t = T.get_thread_binding()
            y[b * 32 + t] = x[b * 32 + t]
            if b > 0:
                y[b * 32 + t] = y[b * 32 + t] + y[(b - 1) * 32 + t]

    return neighbour_sum


def global_exchange(n: int, *, sync: bool) -> Any:
    """Threads of one block exchange through global memory, with or without a barrier."""

    @T.prim_func
    def global_exchange(
        x: T.Tensor[(n,), T.float32], tmp: T.Tensor[(n,), T.float32], y: T.Tensor[(n,), T.float32]
    ):
        with T.Kernel(1, threads=n) as _:
            t = T.get_thread_binding()
            tmp[t] = x[t]
            if sync:
                T.sync_threads()
            y[t] = tmp[n - 1 - t]

    return global_exchange


def unguarded_counter(n: int, *, atomic: bool) -> Any:
    """Every thread adds one to a cell: wrong unless atomic."""

    @T.prim_func
    def unguarded_counter(y: T.Tensor[(1,), T.int32]):
        with T.Kernel(2, threads=n) as _:
            if atomic:
                T.atomic_add(y[0], 1)
            else:
                y[0] = y[0] + 1

    return unguarded_counter


def host_loop() -> Any:
    @T.prim_func
    def host_loop(y: T.Tensor[(64,), T.int32]):
        for i in T.serial(3):
            with T.Kernel(1, threads=64):
                t = T.get_thread_binding()
                y[t] = y[t] + i

    return host_loop


def host_branch() -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def host_branch(y: T.Tensor[(n,), T.int32]):
        if n > 100:
            with T.Kernel(1, threads=64):
                y[T.get_thread_binding()] = 1
        else:
            with T.Kernel(1, threads=64):
                y[T.get_thread_binding()] = 2

    return host_branch


def scalars() -> Any:
    @T.prim_func
    def scalars(
        y: T.Tensor[(32,), T.float32], a: T.float32, b: T.int32, c: T.bool, h: T.float16, u: T.uint8
    ):
        with T.Kernel(1, threads=32):
            rest = T.cast(h, T.float32) + T.cast(u, T.float32) + T.if_then_else(c, 1.0, 0.0)
            y[T.get_thread_binding()] = a + b + rest

    return scalars


def or_into_shared() -> Any:
    """An atomic that TileLang has for global memory only, on shared memory."""

    @T.prim_func
    def or_shared(x: T.Tensor[(1,), T.int32]):
        with T.Kernel(1, threads=32) as _:
            tx = T.get_thread_binding()
            bits = T.alloc_shared((1,), T.int32)
            if tx == 0:
                bits[0] = 0
            T.sync_threads()
            T.atomic_or(bits[0], T.shift_left(1, tx))
            T.sync_threads()
            if tx == 0:
                x[0] = bits[0]

    return or_shared
