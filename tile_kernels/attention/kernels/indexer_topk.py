"""The best entries of each row of logits: a block per row, which reads the row once.

Instead of logits a row may have keys already (see `indexer_list`), 0 for what is absent, and then
names, which are the result instead of places.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.kernels.indexer_list import (
    COUNTERS,
    NO_TYPED_SYNC,
    VECTOR,
    keep_best,
    key_of,
    prefix_over_block,
    sort_entries,
)
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

THREADS = 512
OWN = 4  # logits of a thread in a tile
TILE = THREADS * OWN
BITS = {"float32": 32, "bfloat16": 16, "uint32": 32}
KEYS = "uint32"


class Plan(NamedTuple):
    """`capacity`: entries of the list, with room for two tiles beside the best; `vector`: logits
    that are read at once."""

    topk: int
    dtype: str
    vector: int
    with_start: bool
    by_value: bool
    capacity: int


def plan(
    topk: int, dtype: str, vector: int, with_start: bool, by_value: bool, device: Device
) -> Plan:
    quantum = THREADS * VECTOR
    capacity = -(-(topk + 2 * TILE) // quantum) * quantum
    return Plan(topk, dtype, vector, with_start, by_value, capacity)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    made = Plan(*static)
    return tuple(sorted({32, BITS[made.dtype] * made.vector})), 32


@kernel(plan=plan, access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def best_of_rows(
    topk: int, dtype: str, vector: int, with_start: bool, by_value: bool, capacity: int
) -> Any:
    """See the head of `indexer_list`; -1 where a row has fewer entries."""
    rows, columns = T.dynamic("rows columns")
    stride = T.dynamic("stride", "int64")
    named = dtype == KEYS
    keep = keep_best(topk, capacity, THREADS)
    prefix = prefix_over_block(THREADS)
    sort = sort_entries(topk, THREADS)

    @T.macro
    def load(logits, row, group, stop, values):
        """The logits of a thread in a tile; a vector that begins in range lies in the row."""
        for c in T.unroll(OWN // vector):
            if group * OWN + c * vector < stop:
                for e in T.vectorized(vector):
                    values[c * vector + e] = logits[row, group * OWN + c * vector + e]

    @T.prim_func
    def best_entries(
        logits: T.StridedTensor[(rows, columns), (stride, 1), dtype],
        start: T.Tensor[(rows,), T.int32],
        end: T.Tensor[(rows,), T.int32],
        names: T.Tensor[(rows, columns), T.int32],
        out: T.Tensor[(rows, topk), T.int32],
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            T.assume(stride % vector == 0)
            T.annotate_min_blocks_per_sm(2)
            tx = T.get_thread_binding()
            keys = T.alloc_shared((1, capacity), T.uint32)
            ids = T.alloc_shared((1, capacity), T.int32)
            counters = T.alloc_shared((COUNTERS,), T.int32)
            sums = T.alloc_shared((THREADS // WARP,), T.int32)
            values = T.alloc_local((OWN,), dtype)
            own = T.alloc_local((OWN,), T.uint32)
            before = T.alloc_local((2,), T.int32)
            begin = T.alloc_var(T.int32, init=0)
            stop = T.alloc_var(T.int32, init=columns)
            count = T.alloc_var(T.int32, init=0)
            bound = T.alloc_var(T.uint32, init=T.uint32(0))
            mine = T.alloc_var(T.int32)
            if not named:
                stop = T.max(T.min(end[row], columns), 0)
            if with_start:
                begin = T.min(T.max(start[row], 0), columns)
            group = T.alloc_var(T.int32, init=begin // OWN + tx)  # of the thread's logits in a tile
            tiles = T.alloc_var(T.int32, init=T.ceildiv(stop - begin // OWN * OWN, TILE))
            load(logits, row, group, stop, values)
            for tile in T.serial(tiles):
                mine = 0
                for e in T.unroll(OWN):
                    own[e] = T.uint32(0)
                    if group * OWN + e >= begin and group * OWN + e < stop:
                        if named:
                            own[e] = values[e]
                        else:
                            own[e] = key_of(T.cast(values[e], T.float32))
                    if own[e] > bound:
                        mine = mine + 1
                load(logits, row, group + THREADS, stop, values)  # of the next tile
                prefix(mine, sums, before)
                for e in T.unroll(OWN):
                    if own[e] > bound:
                        keys[0, count + before[0]] = own[e]
                        ids[0, count + before[0]] = group * OWN + e
                        before[0] = before[0] + 1
                count = count + before[1]
                group = group + THREADS
                T.sync_threads()
                # Before the list cannot take another tile, and at the end.
                if count > T.if_then_else(tile + 1 == tiles, topk, capacity - TILE):
                    bound = keep(keys, ids, 0, count, counters, sums)
                    count = topk
                    T.sync_threads()
            if by_value:
                sort(keys, ids, 0, count)
            for c in T.serial(-(-topk // THREADS)):
                place = c * THREADS + tx
                if place < topk:
                    chosen = T.alloc_var(T.int32, init=-1)
                    if place < count:
                        chosen = ids[0, place]
                        if named:
                            chosen = names[row, chosen]
                    out[row, place] = chosen

    return best_entries
