"""The attention that chosen rows get, of all heads together (sm_90a).

A block has one query. A producer warpgroup gathers tiles of 64 rows with 16-byte cp.async, in
halves of their channels; a consumer warpgroup multiplies them by up to 128 heads at a time, so that
the heads of a row are in four neighbouring threads, and adds their weights up.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.attention_bwd.kernel import LOG2E, RIGHT, gather_half
from tile_kernels.attention.attention_bwd.plan import TILE
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.launch import kernel

CONSUMERS = 128  # threads: one warpgroup, which a wgmma takes; other numbers were not compared
WARPS = CONSUMERS // WARP


@kernel(
    access_bits=lambda *_: (32, 32),
    pass_configs={
        "tl.enable_fast_math": True,
        "tl.disable_thread_storage_sync": True,  # mbarriers order everything
    },
)
def summed_weights(dim: int, heads: int, columns: int, normalize: bool) -> Any:
    """`p[t, j]`: the sum over heads of `exp(logit - lse)`, divided by the sum over `j`."""
    tokens, num_rows, slots = T.dynamic("tokens num_rows slots")
    left = dim - RIGHT
    passes = -(-heads // columns)

    @T.prim_func
    def weights_of_rows(
        q: T.Tensor[(tokens, heads, dim), T.bfloat16],
        kv: T.Tensor[(num_rows, dim), T.bfloat16],
        indices: T.Tensor[(tokens, slots), T.int32],
        lse: T.Tensor[(tokens, heads), T.float32],
        p: T.Tensor[(tokens, slots), T.float32],
        sm_scale: T.float32,
    ):
        with T.Kernel(tokens, threads=CONSUMERS + 128) as token:
            tx = T.get_thread_binding()
            qs = T.alloc_shared([columns, dim], T.bfloat16)
            k_l = T.alloc_shared([TILE, left], T.bfloat16)
            k_r = T.alloc_shared([TILE, RIGHT], T.bfloat16)
            full = T.alloc_shared([columns], T.float32)
            valid = T.alloc_shared([2, TILE], "bool")
            warp_sums = T.alloc_shared([WARPS], T.float32)
            q_ready = T.alloc_barrier(CONSUMERS)
            k_l_ready = T.alloc_barrier(128)
            k_r_ready = T.alloc_barrier(128)
            valid_ready = T.alloc_barrier(128)
            k_l_free = T.alloc_barrier(CONSUMERS)
            k_r_free = T.alloc_barrier(CONSUMERS)
            s = T.alloc_fragment([TILE, columns], T.float32)
            found = T.alloc_fragment([TILE], T.float32)
            tiles = T.ceildiv(slots, TILE)

            if tx < CONSUMERS:
                for number in T.serial(passes):
                    T.sync_threads(3, CONSUMERS)
                    T.tma_copy(
                        q[token, number * columns : (number + 1) * columns, :], qs, barrier=q_ready
                    )
                    for h in T.Parallel(columns):
                        full[h] = T.infinity(T.float32)
                        if number * columns + h < heads:
                            full[h] = lse[token, number * columns + h] * LOG2E
                    T.barrier_arrive(q_ready)
                    T.barrier_wait(q_ready, number & 1)
                    for i in T.serial(tiles):
                        at = T.alloc_var(T.int32, init=number * tiles + i)
                        T.barrier_wait(k_l_ready, at & 1)
                        T.wgmma_gemm(k_l, qs[:, :left], s, transpose_B=True, clear_accum=True)
                        T.barrier_wait(k_r_ready, at & 1)
                        T.wgmma_gemm(k_r, qs[:, left:], s, transpose_B=True)
                        T.wait_wgmma(1)
                        T.barrier_arrive(k_l_free)
                        T.wait_wgmma(0)
                        T.barrier_wait(valid_ready, at & 1)
                        T.barrier_arrive(k_r_free)
                        for j, h in T.Parallel(TILE, columns):
                            s[j, h] = T.exp2(s[j, h] * (sm_scale * LOG2E) - full[h])
                        T.reduce_sum(s, found, dim=1)
                        for j in T.Parallel(TILE):
                            if i * TILE + j < slots:
                                if number > 0:
                                    found[j] = found[j] + p[token, i * TILE + j]
                                p[token, i * TILE + j] = T.if_then_else(
                                    valid[at & 1, j], found[j], 0.0
                                )
                if normalize:
                    total = T.alloc_var(T.float32, init=T.float32(0))
                    T.sync_threads(3, CONSUMERS)
                    for step in T.serial(T.ceildiv(slots, CONSUMERS)):
                        if step * CONSUMERS + tx < slots:
                            total = total + p[token, step * CONSUMERS + tx]
                    for d in T.unroll(5):
                        total = total + T.shfl_xor(total, T.shift_left(1, d))
                    if tx % WARP == 0:
                        warp_sums[tx // WARP] = total
                    T.sync_threads(3, CONSUMERS)
                    total = warp_sums[0]
                    for w in T.unroll(WARPS - 1):
                        total = total + warp_sums[w + 1]
                    for step in T.serial(T.ceildiv(slots, CONSUMERS)):
                        if step * CONSUMERS + tx < slots:
                            if total != T.float32(0):
                                p[token, step * CONSUMERS + tx] = (
                                    p[token, step * CONSUMERS + tx] / total
                                )

            else:
                row = (tx - CONSUMERS) // 8
                at_rows = T.alloc_local([4], T.int32)
                ok = T.alloc_local([4], T.int32)
                ahead = T.alloc_local([4], T.int32)
                for r in T.unroll(4):
                    ahead[r] = -1
                    if r * 16 + row < slots:
                        ahead[r] = indices[token, r * 16 + row]
                for number in T.serial(passes * tiles):
                    for r in T.unroll(4):
                        ok[r] = T.cast((ahead[r] >= 0) & (ahead[r] < num_rows), T.int32)
                        at_rows[r] = ahead[r] * ok[r]
                    following = (number + 1) % tiles
                    for r in T.unroll(4):  # the indices of the next step arrive meanwhile
                        ahead[r] = -1
                        if following * TILE + r * 16 + row < slots:
                            ahead[r] = indices[token, following * TILE + r * 16 + row]
                    T.barrier_wait(k_l_free, (number & 1) ^ 1)
                    gather_half(kv, k_l, at_rows, ok, 0, left)
                    T.cp_async_barrier_noinc(k_l_ready)
                    T.barrier_wait(k_r_free, (number & 1) ^ 1)
                    gather_half(kv, k_r, at_rows, ok, left, RIGHT)
                    T.cp_async_barrier_noinc(k_r_ready)
                    if (tx - CONSUMERS) % 8 == 0:
                        for r in T.unroll(4):
                            valid[number & 1, r * 16 + row] = ok[r] != 0
                    T.barrier_arrive(valid_ready)

    return weights_of_rows
