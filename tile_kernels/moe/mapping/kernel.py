"""The mapping between tokens and the rows of a grouped matrix product: a stable counting sort.

Two launches of one host call. The slots (token, k) are cut into chunks, one per block. The first
launch counts the experts of each chunk; in the second every block sums those counts (how many slots
of each expert there are, and how many come before its chunk), lays out the experts' ranges, and
places its own slots. A position depends on the slots before it alone, so neither the number of
blocks nor their order can be seen in the result.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.count.kernel import (
    count_chunk,
    load_groups,
    num_chunks,
    sum_chunks,
)
from tile_kernels.moe.count.plan import BATCH, MAX_CHUNKS, THREADS
from tile_kernels.moe.mapping.plan import WARPS
from tile_kernels.moe.primitives import LANES
from tile_kernels.runtime.launch import kernel


def access_bits(*static: int) -> tuple[tuple[int, ...], int]:
    return tuple(sorted({64, 32 * static[-1]})), 32


@T.macro
def exclusive_prefix(value, sums):
    """The sum of `value` over all threads before this one; `sums` is shared, one per warp."""
    tx = T.get_thread_binding()
    lane = tx % LANES
    running = T.alloc_var(T.int32, init=value)
    other = T.alloc_var(T.int32)
    for d in T.unroll(5):
        other = T.shfl_up(running, T.shift_left(1, d))
        if lane >= T.shift_left(1, d):
            running = running + other
    if lane == LANES - 1:
        sums[tx // LANES] = running
    T.sync_threads()
    before = T.alloc_var(T.int32, init=running - value)
    for w in T.unroll(WARPS):
        if w < tx // LANES:
            before = before + sums[w]
    return before


@kernel(
    access_bits=access_bits,
    pass_configs={"tl.disable_thread_storage_sync": True},  # all barriers are written out
)
def fused_mapping(
    num_topk: int, num_experts: int, max_chunks: int, placing_warps: int, vector: int
) -> Any:
    """See the head of this file. `flat` holds all results in the order of the reference's."""
    quantum = placing_warps * LANES
    experts_per_thread = -(-num_experts // THREADS)
    add_chunks = sum_chunks(num_experts, vector, with_earlier=True)
    num_slots, size = T.dynamic("num_slots size")

    @T.prim_func
    def mapping(
        topk_idx: T.Tensor[(num_slots,), T.int64],
        counts: T.Tensor[(MAX_CHUNKS, num_experts), T.int32],
        flat: T.Tensor[(size,), T.int32],
        capacity: T.int32,
        alignment: T.int32,
    ):
        with T.Kernel(num_chunks(num_slots, max_chunks), threads=THREADS) as chunk:
            chunks = num_chunks(num_slots, max_chunks)
            length = T.ceildiv(num_slots, chunks * quantum) * quantum
            count_chunk(
                topk_idx,
                chunk * length,
                (chunk + 1) * length,
                num_slots,
                num_experts,
                counts,
                chunk,
            )

        with T.Kernel(num_chunks(num_slots, max_chunks), threads=THREADS) as chunk:
            chunks = num_chunks(num_slots, max_chunks)
            tx = T.get_thread_binding()
            lane = tx % LANES
            warp = tx // LANES
            total = T.alloc_shared((num_experts,), T.int32)
            start = T.alloc_shared((num_experts,), T.int32)  # first: slots in earlier chunks
            next_position = T.alloc_shared((placing_warps, num_experts), T.int32)
            sums = T.alloc_shared((WARPS,), T.int32)
            dropped = T.alloc_shared((1,), T.int32)
            length = T.ceildiv(num_slots, chunks * quantum) * quantum
            first_slot = T.alloc_var(T.int32, init=0)  # of this warp, if it places slots
            end = T.alloc_var(T.int32, init=0)
            if warp < placing_warps:
                first_slot = chunk * length + warp * (length // placing_warps)
                end = first_slot + length // placing_warps
            experts = T.alloc_local((BATCH,), T.int32)
            number = T.alloc_var(T.int32)
            entry = T.alloc_var(T.int32)
            value = T.alloc_var(T.int32)

            for step in T.serial(T.ceildiv(placing_warps * num_experts, THREADS)):
                i = step * THREADS + tx
                if i < placing_warps * num_experts:
                    next_position[i // num_experts, i % num_experts] = 0
                if i < num_experts:
                    total[i] = 0
                    start[i] = 0
            if tx == 0:
                dropped[0] = 0
            T.sync_threads()

            # How often each expert stands in this warp's slots, in all chunks, in earlier chunks.
            for step in T.serial(T.ceildiv(length, BATCH * quantum)):
                first = first_slot + step * BATCH * LANES + lane
                load_groups(topk_idx, first, LANES, end, num_slots, num_experts, experts)
                for i in T.unroll(BATCH):
                    if experts[i] >= 0:
                        T.atomic_add(next_position[warp, experts[i]], 1)
            add_chunks(counts, chunks, chunk, total, start)
            T.sync_threads()

            # Ranges, in the order of the experts; then where each warp's first slot goes.
            number = 0
            for i in T.unroll(experts_per_thread):
                e = tx * experts_per_thread + i
                if e < num_experts:
                    number = number + T.ceildiv(total[e], alignment) * alignment
            begin = T.alloc_var(T.int32, init=exclusive_prefix(number, sums))
            for i in T.unroll(experts_per_thread):
                e = tx * experts_per_thread + i
                if e < num_experts:
                    value = begin + start[e]
                    start[e] = begin
                    for w in T.serial(placing_warps):
                        entry = next_position[w, e]
                        next_position[w, e] = value
                        value = value + entry
                    number = T.ceildiv(total[e], alignment) * alignment
                    if chunk == 0:
                        base = 3 * capacity + num_slots
                        flat[base + e] = T.min(begin, capacity)
                        flat[base + num_experts + e] = T.min(begin + number, capacity)
                        flat[base + 2 * num_experts + e] = T.min(begin + number, capacity) - T.min(
                            begin, capacity
                        )
                        value = begin + total[e] - T.max(begin, capacity)
                        if value > 0:
                            T.atomic_add(dropped[0], value)
                    begin = begin + number
            T.sync_threads()
            if chunk == 0 and tx == 0:
                flat[3 * capacity + num_slots + 3 * num_experts] = dropped[0]

            # Slots in ascending order: lanes with the same expert take its next positions in turn.
            for step in T.serial(T.ceildiv(length, BATCH * quantum)):
                first = first_slot + step * BATCH * LANES + lane
                load_groups(topk_idx, first, LANES, end, num_slots, num_experts, experts)
                for i in T.unroll(BATCH):
                    slot = first + i * LANES
                    value = experts[i]
                    peers = T.alloc_var(T.uint32, init=T.match_any_sync(value))
                    earlier_lanes = T.shift_left(T.uint32(1), T.cast(lane, T.uint32)) - T.uint32(1)
                    rank = T.alloc_var(
                        T.int32, init=T.cast(T.popcount(peers & earlier_lanes), T.int32)
                    )
                    number = -1
                    if value >= 0:
                        number = next_position[warp, value] + rank
                    T.sync_warp()
                    if value >= 0:
                        if rank == 0:
                            next_position[warp, value] = number + T.cast(T.popcount(peers), T.int32)
                        if number < capacity:
                            flat[number] = value
                            flat[capacity + number] = slot // num_topk
                            flat[2 * capacity + number] = slot
                        else:
                            number = -1
                    T.sync_warp()
                    if slot < end and slot < num_slots:
                        flat[3 * capacity + slot] = number

            # Padding behind each expert's slots (`alignment` candidates for each), all blocks
            # together; then everything behind the last range.
            for step in T.serial(T.ceildiv(num_experts * alignment, chunks * THREADS)):
                i = (step * chunks + chunk) * THREADS + tx
                if i < num_experts * alignment:
                    entry = i // alignment
                    value = start[entry] + total[entry] + i % alignment
                    number = T.ceildiv(total[entry], alignment) * alignment
                    if value < start[entry] + number and value < capacity:
                        flat[value] = -1
                        flat[capacity + value] = -1
                        flat[2 * capacity + value] = -1
            number = start[num_experts - 1] + (
                T.ceildiv(total[num_experts - 1], alignment) * alignment
            )
            for step in T.serial(T.ceildiv(T.max(capacity - number, 0), chunks * THREADS)):
                value = number + (step * chunks + chunk) * THREADS + tx
                if value < capacity:
                    flat[value] = -1
                    flat[capacity + value] = -1
                    flat[2 * capacity + value] = -1

    return mapping
