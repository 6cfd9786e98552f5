"""Attention over chosen rows: the producer gathers them with asynchronous copies of 16 bytes."""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.attention.softmax_primitives import (
    HALF,
    HEADS,
    LANES,
    NAMED,
    PASS_CONFIGS,
    PRODUCER_REGISTERS,
    ROUNDS,
    ROWS,
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
    copy_vectors,
    shared_memory,
)
from tile_kernels.attention.sparse.plan import Plan
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=lambda *_: (32, (32, 128)), pass_configs=PASS_CONFIGS)
def attend_rows(*static: Any) -> Any:
    """A block computes 64 heads of a query at a time; those of a query are computed next to each
    other at the same time, so that L2 has its rows."""
    width, with_sink, with_length, *rest = Plan(*static)
    schedule = Schedule(*rest)
    consume = consumers(width, with_sink, schedule)
    with_tail = width > 2 * HALF
    tokens, heads, num_rows, k = T.dynamic("tokens heads num_rows k")
    q_stride, q_head_stride, kv_stride, k_stride = T.dynamic(
        "q_stride q_head_stride kv_stride k_stride"
    )

    @T.macro
    def read_index(indices, token, pair, limit, index):
        """This thread's row of a pair of tiles; -1 if there is none."""
        position = pair * 2 * TILE + T.get_thread_binding() - 2 * WARPGROUP
        index[0] = -1
        if position < limit:
            index[0] = indices[token, position]
            if index[0] >= num_rows:
                index[0] = -1

    @T.macro
    def copy_chunk(kv, rows, slot, tile, target, offset, first_channel, channels):
        """This thread's part of a tile; zeros where the row is negative."""
        place_row = (T.get_thread_binding() - 2 * WARPGROUP) // LANES
        for r in T.unroll(ROUNDS):
            row = T.alloc_var(T.int32, init=rows[slot, tile * TILE + r * ROWS + place_row])
            copy_vectors(
                kv, T.cast(T.max(row, 0), T.int64), row >= 0, target, r * ROWS + place_row, offset,
                first_channel, channels,
            )  # fmt: skip

    @T.macro
    def copy_half(kv, rows, slot, tile, half, offset, ready):
        for c in range(HALF // schedule.chunk):
            copy_chunk(kv, rows, slot, tile, half, offset, c * schedule.chunk, schedule.chunk)
            T.cp_async_barrier_noinc(ready[c])

    @T.macro
    def copy_tail(kv, rows, slot, tile, target):
        """The rest of the channels; the arrival for the half tile that comes next covers them."""
        if with_tail:
            copy_chunk(kv, rows, slot, tile, target, 2 * HALF, 0, TAIL)

    @T.macro
    def find(n, block, blocks, lengths, work):
        """Token, first head, pairs of tiles, and length of the n-th result of a block."""
        item = T.alloc_var(T.int32, init=block + n * blocks)
        # A variable of each expansion: TileLang reuses a load from an array with the same index.
        token = T.alloc_var(T.int32, init=T.truncdiv(item, T.ceildiv(heads, HEADS)))
        work[0] = token
        work[1] = (item - token * T.ceildiv(heads, HEADS)) * HEADS
        work[3] = k
        if with_length:
            work[3] = T.max(0, T.min(k, lengths[token]))
        work[2] = T.ceildiv(work[3], 2 * TILE)

    @T.macro
    def produce(q, kv, indices, items, tiles, gates):
        """Each thread reads one index of a pair of tiles, one pair ahead, and tells the others."""
        T.set_max_nreg(PRODUCER_REGISTERS, 0)
        thread = T.get_thread_binding() - 2 * WARPGROUP
        rows = T.alloc_shared((2, 2 * TILE), T.int32)  # a double buffer
        work = T.alloc_local((WORK,), T.int32)
        index = T.alloc_local((1,), T.int32)
        bits = T.alloc_var(T.uint32)
        done = T.alloc_var(T.int32, init=0)
        for n in T.serial(items.count):
            items.find(n, work)
            read_index(indices, work[0], 0, work[3], index)
            copy_queries(q, work[0], work[1], n, tiles, gates)
            for i in T.serial(work[2]):
                slot = (done + i) & 1
                rows[slot, thread] = index[0]
                bits = T.cast(T.ballot(index[0] >= 0), T.uint32)
                read_index(indices, work[0], i + 1, work[3], index)
                T.sync_threads(NAMED + 2, WARPGROUP)  # rows are there; those before are not read
                T.barrier_wait(gates.even_l_free, slot ^ 1)
                copy_half(kv, rows, slot, 0, tiles.even_l, 0, gates.even_l)
                if schedule.early:
                    T.barrier_wait(gates.even_r_free, slot ^ 1)
                    copy_tail(kv, rows, slot, 0, tiles.weights_even)
                    copy_half(kv, rows, slot, 0, tiles.even_r, HALF, gates.even_r)
                else:
                    T.barrier_wait(gates.odd_r_free, slot ^ 1)
                    copy_half(kv, rows, slot, 1, tiles.odd_r, HALF, gates.odd_r)
                # Both consumers have masked the pair before: they freed what was just loaded. A
                # plain arrival, as that of the copies does not order these stores.
                if thread % WARP == 0:
                    tiles.mask[thread // TILE, thread % TILE // WARP] = bits
                T.barrier_arrive(gates.mask)
                if schedule.early:
                    T.barrier_wait(gates.odd_r_free, slot ^ 1)
                    copy_half(kv, rows, slot, 1, tiles.odd_r, HALF, gates.odd_r)
                else:
                    T.barrier_wait(gates.even_r_free, slot ^ 1)
                    copy_tail(kv, rows, slot, 0, tiles.weights_even)
                    copy_half(kv, rows, slot, 0, tiles.even_r, HALF, gates.even_r)
                T.barrier_wait(gates.odd_l_free, slot ^ 1)
                copy_tail(kv, rows, slot, 1, tiles.weights_odd)
                copy_half(kv, rows, slot, 1, tiles.odd_l, 0, gates.odd_l)
            done = done + work[2]

    @T.prim_func
    def attend(
        q: T.StridedTensor[(tokens, heads, width), (q_stride, q_head_stride, 1), T.bfloat16],
        kv: T.StridedTensor[(num_rows, width), (kv_stride, 1), T.bfloat16],
        indices: T.StridedTensor[(tokens, k), (k_stride, 1), T.int32],
        sink: T.Tensor[(heads,), T.float32],
        lengths: T.Tensor[(tokens,), T.int32],
        out: T.Tensor[(tokens, heads, 2 * HALF), T.bfloat16],
        max_logits: T.Tensor[(tokens, heads), T.float32],
        lse: T.Tensor[(tokens, heads), T.float32],
        scale: T.float32,  # of logits, times log2(e)
        max_blocks: T.int32,
    ):
        with T.Kernel(
            T.min(max_blocks, tokens * T.ceildiv(heads, HEADS)), threads=THREADS
        ) as block:
            T.assume(kv_stride % VECTOR == 0)
            results = tokens * T.ceildiv(heads, HEADS)
            blocks = T.min(max_blocks, results)
            tx = T.get_thread_binding()
            tiles = Tiles(*shared_memory(width))
            gates = Barriers(*barriers(schedule.chunk, 1))
            count = T.alloc_var(T.int32, init=T.truncdiv(results - 1 - block, blocks) + 1)
            items = Items(count, lambda n, work: find(n, block, blocks, lengths, work))
            if tx < WARPGROUP:
                consume.first(tiles, gates, items, scale, sink, out, max_logits, lse, heads)
            elif tx < 2 * WARPGROUP:
                consume.second(tiles, gates, items, scale, sink, out, heads)
            else:
                produce(q, kv, indices, items, tiles, gates)

    return attend
