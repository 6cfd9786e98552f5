"""Histograms of indices: one per block, summed by the block that finishes last, in one launch.

The macros serve the mapping too: chunks of consecutive indices, one per block, and their counts.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.count.plan import BATCH, INDICES_PER_CHUNK, MAX_CHUNKS, THREADS
from tile_kernels.runtime.kernels.common import is_last_block
from tile_kernels.runtime.launch import kernel

# Rows of counts whose loads a thread has in flight at a time. Other numbers were not measured.
ROWS_AT_ONCE = 8


def num_chunks(count: Any, limit: int) -> Any:
    """Blocks that share `count` indices: one for each step of a block, up to `limit`."""
    return T.min(T.ceildiv(count, INDICES_PER_CHUNK), limit)


@T.macro
def load_groups(indices, first, stride, end, count, num_groups, groups):
    """The groups at `first + i * stride`, before `end`; -1 for none. All loads go out first."""
    raw = T.alloc_local((BATCH,), T.int64)
    for i in T.unroll(BATCH):
        raw[i] = T.int64(-1)
        if first + i * stride < end and first + i * stride < count:
            raw[i] = indices[first + i * stride]
    for i in T.unroll(BATCH):
        groups[i] = -1
        if raw[i] >= 0 and raw[i] < num_groups:
            groups[i] = T.cast(raw[i], T.int32)


@T.macro
def count_chunk(indices, first, end, count, num_groups, counts, chunk):
    """Count the indices `first .. end - 1` into row `chunk` of `counts`."""
    tx = T.get_thread_binding()
    histogram = T.alloc_shared((num_groups,), T.int32)
    groups = T.alloc_local((BATCH,), T.int32)
    for step in T.unroll(-(-num_groups // THREADS)):
        if step * THREADS + tx < num_groups:
            histogram[step * THREADS + tx] = 0
    T.sync_threads()
    for step in T.serial(T.ceildiv(end - first, BATCH * THREADS)):
        index = first + step * BATCH * THREADS + tx
        load_groups(indices, index, THREADS, end, count, num_groups, groups)
        for i in T.unroll(BATCH):
            if groups[i] >= 0:
                T.atomic_add(histogram[groups[i]], 1)
    T.sync_threads()
    for step in T.unroll(-(-num_groups // THREADS)):
        if step * THREADS + tx < num_groups:
            counts[chunk, step * THREADS + tx] = histogram[step * THREADS + tx]


def sum_chunks(num_groups: int, vector: int, with_earlier: bool) -> Any:
    """A macro: adds the counts of all chunks to `total`, of those before `chunk` to `earlier`.

    Both are shared and zero before; without `with_earlier` the second is None. A thread has some
    neighbouring groups of some of the chunks, and all of its loads in flight at once.
    """
    accesses = num_groups // vector  # of a chunk
    parts = max(1, THREADS // accesses)

    @T.macro
    def summed(counts, chunks, chunk, total, earlier):
        tx = T.get_thread_binding()
        raw = T.alloc_local((ROWS_AT_ONCE, vector), T.int32)
        sums = T.alloc_local((vector,), T.int32)
        earlier_sums = T.alloc_local((vector,), T.int32)
        for step in T.unroll(-(-accesses // THREADS)):
            access = tx % accesses if parts > 1 else step * THREADS + tx
            part = tx // accesses if parts > 1 else 0
            if access < accesses and part < parts:
                for v in T.unroll(vector):
                    sums[v] = 0
                    earlier_sums[v] = 0
                for j in T.serial(T.ceildiv(chunks, ROWS_AT_ONCE * parts)):
                    for i in T.unroll(ROWS_AT_ONCE):
                        row = (j * ROWS_AT_ONCE + i) * parts + part
                        for v in T.unroll(vector):
                            raw[i, v] = 0
                        if row < chunks:
                            for v in T.vectorized(vector):
                                raw[i, v] = counts[row, access * vector + v]
                    for i in T.unroll(ROWS_AT_ONCE):
                        row = (j * ROWS_AT_ONCE + i) * parts + part
                        for v in T.unroll(vector):
                            sums[v] = sums[v] + raw[i, v]
                            if with_earlier:
                                if row < chunk:
                                    earlier_sums[v] = earlier_sums[v] + raw[i, v]
                for v in T.unroll(vector):
                    T.atomic_add(total[access * vector + v], sums[v])
                    if with_earlier:
                        T.atomic_add(earlier[access * vector + v], earlier_sums[v])

    return summed


def access_bits(
    num_groups: int, max_chunks: int, as_fraction: bool, vector: int
) -> tuple[tuple[int, ...], int]:
    """Indices are read one by one, as neighbours fill whole sectors."""
    return tuple(sorted({64, 32 * vector})), 32


@kernel(
    access_bits=access_bits,
    pass_configs={"tl.disable_thread_storage_sync": True},  # all barriers are written out
)
def group_count(num_groups: int, max_chunks: int, as_fraction: bool, vector: int) -> Any:
    """Counts as they are, or times the number of groups over `slots`."""
    count, num_tickets = T.dynamic("count num_tickets")
    add_chunks = sum_chunks(num_groups, vector, with_earlier=False)
    result_dtype = T.float32 if as_fraction else T.int32

    @T.prim_func
    def counted(
        indices: T.Tensor[(count,), T.int64],
        counts: T.Tensor[(MAX_CHUNKS, num_groups), T.int32],
        result: T.Tensor[(num_groups,), result_dtype],
        tickets: T.Tensor[(num_tickets,), T.int32],
        ticket: T.int32,
        slots: T.float32,
    ):
        with T.Kernel(num_chunks(count, max_chunks), threads=THREADS) as chunk:
            chunks = num_chunks(count, max_chunks)
            tx = T.get_thread_binding()
            total = T.alloc_shared((num_groups,), T.int32)
            length = T.ceildiv(count, chunks)
            for step in T.unroll(-(-num_groups // THREADS)):
                if step * THREADS + tx < num_groups:
                    total[step * THREADS + tx] = 0
            count_chunk(
                indices, chunk * length, (chunk + 1) * length, count, num_groups, counts, chunk
            )
            if is_last_block(tickets, ticket, chunks):
                add_chunks(counts, chunks, 0, total, None)
                T.sync_threads()
                for step in T.unroll(-(-num_groups // THREADS)):
                    group = step * THREADS + tx
                    if group < num_groups:
                        if as_fraction:
                            scaled = T.ieee_mul(
                                T.cast(total[group], T.float32), T.float32(num_groups)
                            )
                            result[group] = T.ieee_fdiv(scaled, slots)
                        else:
                            result[group] = total[group]

    return counted
