"""Attention over windows and all entries: rows follow each other, so that a tile is one copy (TMA).

A tile that has fewer rows than its 64 is gathered with copies of 16 bytes, zeros for others: the
next rows in memory belong to later tokens or to nobody, and a weight of 0 does not cancel their
NaN.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.hca.plan import Plan
from tile_kernels.attention.sequence_primitives import visible_rows
from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.attention.softmax_primitives import (
    HALF,
    HEADS,
    PASS_CONFIGS,
    PRODUCER_REGISTERS,
    TAIL,
    THREADS,
    TILE,
    VECTOR,
    WARPGROUP,
    WORK,
    Barriers,
    Items,
    Tiles,
    barriers,
    consumers,
    copy_queries,
    copy_rows,
    shared_memory,
)
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=lambda *_: (32, (32, 128)), pass_configs=PASS_CONFIGS)
def attend_sequences(*static: Any) -> Any:
    """A block computes 64 heads of a query at a time; the last queries, which have most entries,
    come first. Blocks of a cluster compute different heads of one query."""
    width, with_entries, with_sink, *rest = Plan(*static)
    schedule = Schedule(*rest)
    cluster = schedule.cluster
    consume = consumers(width, with_sink, schedule)
    with_tail = width > 2 * HALF
    tokens, heads, num_entries, num_bounds = T.dynamic("tokens heads num_entries num_bounds")
    q_stride, q_head_stride, row_stride, entry_stride = T.dynamic(
        "q_stride q_head_stride row_stride entry_stride"
    )

    def grid(blocks: Any) -> Any:
        if cluster > 1:
            return T.ClusterKernel(blocks, threads=THREADS, cluster_dims=cluster)
        return T.Kernel(blocks, threads=THREADS)

    @T.macro
    def locate(tile, work, at):
        """Of a tile: whether it has entries, its first row, and how many rows it has."""
        window_tiles = T.ceildiv(work[4], TILE)
        at[0] = 0
        at[1] = work[3] + tile * TILE
        at[2] = T.max(0, T.min(TILE, work[4] - tile * TILE))
        if with_entries:
            if tile >= window_tiles:
                at[0] = 1
                at[1] = work[5] + (tile - window_tiles) * TILE
                at[2] = T.max(0, T.min(TILE, work[6] - (tile - window_tiles) * TILE))

    @T.macro
    def copy_part(rows, at, target, offset, first_channel, channels, ready, number):
        """Channels of a tile from `rows`; the arrival at `ready[number]` is left to the caller."""
        if at[2] == TILE:
            T.tma_copy(  # by one thread
                rows[
                    at[1] : at[1] + TILE,
                    offset + first_channel : offset + first_channel + channels,
                ],
                target[:, first_channel : first_channel + channels],
                barrier=ready[number],
                cluster_mask=3 if cluster > 1 else None,
            )
        else:
            copy_rows(rows, at[1], at[2], target, offset, first_channel, channels)

    @T.macro
    def copy_channels(
        window_kv, entries, at, target, offset, first_channel, channels, ready, number
    ):
        if with_entries:
            if at[0] == 1:
                copy_part(entries, at, target, offset, first_channel, channels, ready, number)
            else:
                copy_part(window_kv, at, target, offset, first_channel, channels, ready, number)
        else:
            copy_part(window_kv, at, target, offset, first_channel, channels, ready, number)

    @T.macro
    def copy_half(window_kv, entries, at, half, offset, ready, tail):
        """A half tile, and before it the `tail` of keys, if that is not None."""
        if tail is not None:
            copy_channels(window_kv, entries, at, tail, 2 * HALF, 0, TAIL, ready, 0)
        for c in range(HALF // schedule.chunk):
            copy_channels(
                window_kv, entries, at, half, offset, c * schedule.chunk, schedule.chunk, ready, c
            )
            if at[2] == TILE:
                T.barrier_arrive(ready[c])
            else:
                T.cp_async_barrier_noinc(ready[c])

    @T.macro
    def write_mask(even, odd, mask):
        thread = T.get_thread_binding() - 2 * WARPGROUP
        if thread < 4:
            rows = T.if_then_else(thread < 2, even[2], odd[2]) - thread % 2 * 32
            mask[thread // 2, thread % 2] = T.if_then_else(
                rows >= 32,
                T.uint32(0xFFFFFFFF),
                (T.uint32(1) << T.cast(T.max(rows, 0), T.uint32)) - T.uint32(1),
            )

    @T.macro
    def find(n, first, step, rank, cu_seqlens, window, ratio, work):
        """Token, first head, pairs of tiles, and visible rows of the n-th result of a block.

        The blocks of a cluster have the same token.
        """
        item = T.alloc_var(T.int32, init=first + n * step)
        order = T.alloc_var(T.int32, init=T.truncdiv(item, T.ceildiv(heads, cluster * HEADS)))
        token = T.alloc_var(T.int32, init=tokens - 1 - order)
        found = T.alloc_local((4,), T.int32)
        visible_rows(
            cu_seqlens, num_bounds, token, tokens, window, ratio,
            num_entries if with_entries else 0, found,
        )  # fmt: skip
        work[0] = token
        work[1] = (item - order * T.ceildiv(heads, cluster * HEADS)) * cluster * HEADS
        work[1] = work[1] + rank * HEADS
        work[2] = T.ceildiv(T.ceildiv(found[1], TILE) + T.ceildiv(found[3], TILE), 2)
        for e in T.unroll(4):
            work[3 + e] = found[e]

    @T.macro
    def produce(q, window_kv, entries, items, tiles, gates):
        T.set_max_nreg(PRODUCER_REGISTERS, 0)
        even = T.alloc_local((3,), T.int32)
        odd = T.alloc_local((3,), T.int32)
        work = T.alloc_local((WORK,), T.int32)
        done = T.alloc_var(T.int32, init=0)
        even_tail = tiles.weights_even if with_tail else None
        odd_tail = tiles.weights_odd if with_tail else None
        for n in T.serial(items.count):
            items.find(n, work)
            copy_queries(q, work[0], work[1], n, tiles, gates)
            for i in T.serial(work[2]):
                free = ((done + i) & 1) ^ 1
                locate(2 * i, work, even)
                locate(2 * i + 1, work, odd)
                T.barrier_wait(gates.even_l_free, free)
                copy_half(window_kv, entries, even, tiles.even_l, 0, gates.even_l, None)
                if schedule.early:
                    T.barrier_wait(gates.even_r_free, free)
                    copy_half(window_kv, entries, even, tiles.even_r, HALF, gates.even_r, even_tail)
                else:
                    T.barrier_wait(gates.odd_r_free, free)
                    copy_half(window_kv, entries, odd, tiles.odd_r, HALF, gates.odd_r, None)
                # Both consumers have masked the pair before: they freed what was just loaded.
                write_mask(even, odd, tiles.mask)
                T.barrier_arrive(gates.mask)
                if schedule.early:
                    T.barrier_wait(gates.odd_r_free, free)
                    copy_half(window_kv, entries, odd, tiles.odd_r, HALF, gates.odd_r, None)
                else:
                    T.barrier_wait(gates.even_r_free, free)
                    copy_half(window_kv, entries, even, tiles.even_r, HALF, gates.even_r, even_tail)
                T.barrier_wait(gates.odd_l_free, free)
                copy_half(window_kv, entries, odd, tiles.odd_l, 0, gates.odd_l, odd_tail)
            done = done + work[2]

    @T.prim_func
    def attend(
        q: T.StridedTensor[(tokens, heads, width), (q_stride, q_head_stride, 1), T.bfloat16],
        window_kv: T.StridedTensor[(tokens, width), (row_stride, 1), T.bfloat16],
        entries: T.StridedTensor[(num_entries, width), (entry_stride, 1), T.bfloat16],
        cu_seqlens: T.Tensor[(num_bounds,), T.int32],
        sink: T.Tensor[(heads,), T.float32],
        out: T.Tensor[(tokens, heads, 2 * HALF), T.bfloat16],
        max_logits: T.Tensor[(tokens, heads), T.float32],
        lse: T.Tensor[(tokens, heads), T.float32],
        window: T.int32,
        ratio: T.int32,
        scale: T.float32,  # of logits, times log2(e)
        max_blocks: T.int32,
    ):
        with grid(
            T.min(T.max(max_blocks // cluster, 1), tokens * T.ceildiv(heads, cluster * HEADS))
            * cluster
        ) as block:
            T.assume(row_stride % VECTOR == 0)
            if with_entries:
                T.assume(entry_stride % VECTOR == 0)
            results = tokens * T.ceildiv(heads, cluster * HEADS)  # of all blocks of a cluster
            clusters = T.min(T.max(max_blocks // cluster, 1), results)
            first = block // cluster
            rank = block % cluster
            tx = T.get_thread_binding()
            tiles = Tiles(*shared_memory(width))
            gates = Barriers(*barriers(schedule.chunk, cluster))
            count = T.alloc_var(T.int32, init=T.truncdiv(results - 1 - first, clusters) + 1)
            items = Items(
                count,
                lambda n, work: find(n, first, clusters, rank, cu_seqlens, window, ratio, work),
            )
            if cluster > 1:
                T.cluster_sync()  # all barriers are initialised
            if tx < WARPGROUP:
                consume.first(tiles, gates, items, scale, sink, out, max_logits, lse, heads)
            elif tx < 2 * WARPGROUP:
                consume.second(tiles, gates, items, scale, sink, out, heads)
            else:
                produce(q, window_kv, entries, items, tiles, gates)
            if cluster > 1:
                T.cluster_sync()  # no block leaves while the other may still signal it

    return attend
