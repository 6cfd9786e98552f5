"""The best entries of each row of logits: a block per row, which reads the row once.

A sample of the row, read ahead, tells which bound leaves somewhat more than the best. With that
bound a row's list takes what is above it as it comes. A guess that was too high shows at the end,
when too few entries were above it: then the row is read again without one.

Instead of logits a row may have keys already (see `list_primitives`), 0 for what is absent, and
then names, which are the result instead of positions.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer_plan import BINS
from tile_kernels.attention.list_primitives import (
    FOUND,
    LOWEST,
    NO_TYPED_SYNC,
    bit,
    entries_to_keep,
    keep_best,
    key_of_bits,
    least_of_best,
    number_of,
    prefix_over_block,
    sort_entries,
)
from tile_kernels.attention.topk.plan import (
    OWN,
    PART,
    THREADS,
    TILE,
    UNIT,
    UNITS,
    PartPlan,
    Plan,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

WARPS = THREADS // WARP
MAX_OWN = 14  # entries of a list for each thread that leave registers for two blocks
SAMPLED_UNITS = 2  # of a thread
SAMPLE = THREADS * UNIT * SAMPLED_UNITS
NEAR = 4  # threads whose units of the sample are one after the other
# The bound of a sample leaves a quarter more than asked for, and some more: fewer than asked for is
# then an event of four standard deviations, also for small `topk`, if neighbours are independent.
SPARE_RANK = 24
BITS = {"float32": 32, "bfloat16": 16, "uint32": 32}
KEYS = "uint32"


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    fields = Plan(*static)
    return tuple(sorted({32, BITS[fields.dtype] * fields.vector})), 32


@kernel(access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def best_of_rows(
    topk: int, dtype: str, vector: int, with_start: bool, by_value: bool, capacity: int
) -> Any:
    """See the head of `list_primitives`; -1 where a row has fewer entries."""
    rows, columns = T.dynamic("rows columns")
    stride = T.dynamic("stride", "int64")
    named = dtype == KEYS
    key = (lambda word: word) if named else key_of_bits
    keep = keep_best(topk, capacity, THREADS, key)
    least_of_sample = least_of_best(SAMPLED_UNITS * UNIT, THREADS)
    sort = sort_entries(topk, THREADS, key)

    @T.macro
    def load(logits, row, unit, stop, values, at):
        """A unit; a vector that begins in range lies in the row."""
        for c in T.unroll(UNIT // vector):
            if unit * UNIT + c * vector < stop:
                for e in T.vectorized(vector):
                    values[at + c * vector + e] = logits[row, unit * UNIT + c * vector + e]

    @T.macro
    def load_tile(logits, row, unit, stop, values):
        """The units of a thread from `unit` on, each beside those of its warp."""
        for u in T.unroll(UNITS):
            load(logits, row, unit + u * WARP, stop, values, u * UNIT)

    def word(value: Any) -> Any:
        """What lists hold: the bits of a float32, or a key."""
        return value if named else T.reinterpret(T.cast(value, T.float32), T.uint32)

    def part(unit_counts: Any, unit: Any) -> Any:
        """The byte of a unit."""
        return T.cast((unit_counts >> T.cast(8 * unit, T.uint32)) & T.uint32(255), T.int32)

    @T.macro
    def mark(values, unit, begin, stop, bound, threshold, inner, passed):
        """The bits of what is above the bound: numbers from `threshold` on in an `inner` tile."""
        passed[0] = T.uint32(0)
        if bound > T.uint32(0) and inner:
            for e in T.unroll(OWN):
                if named:
                    if values[e] > bound:
                        passed[0] = passed[0] | bit(e)
                elif T.cast(values[e], T.float32) >= threshold:
                    passed[0] = passed[0] | bit(e)
        else:
            for e in T.unroll(OWN):
                index = (unit + e // UNIT * WARP) * UNIT + e % UNIT
                if index >= begin and index < stop:
                    if key(word(values[e])) > bound:
                        passed[0] = passed[0] | bit(e)

    @T.macro
    def enter(values, unit, passed, iteration, warp_counts, words, ids, count):
        """Append what passed, in the order of places: warps, units, lanes. Has a barrier."""
        lane = T.get_thread_binding() % WARP
        warp = T.get_thread_binding() // WARP
        own = T.alloc_var(T.uint32, init=T.uint32(0))  # a byte for each unit: how many passed
        before = T.alloc_var(T.uint32)  # of the lanes before
        other = T.alloc_var(T.uint32)
        warp_count = T.alloc_var(T.int32, init=0)
        for u in T.unroll(UNITS):
            passed_of_unit = (passed[0] >> T.uint32(u * UNIT)) & T.uint32(2**UNIT - 1)
            own = own | (T.cast(T.popcount(passed_of_unit), T.uint32) << T.uint32(8 * u))
        before = own
        for d in T.unroll(5):
            other = T.shfl_up(before, T.shift_left(1, d))
            if lane >= T.shift_left(1, d):
                before = before + other
        other = T.shfl_sync(before, WARP - 1)
        before = before - own
        for u in T.unroll(UNITS):
            warp_count = warp_count + part(other, u)
        if lane == 0:
            warp_counts[iteration, warp] = warp_count
        T.sync_threads()
        warp_count = 0
        if lane < WARPS:
            warp_count = warp_counts[iteration, lane]
        at = T.alloc_var(T.int32, init=count[0])
        count[0] = count[0] + T.warp_reduce_sum(warp_count)
        if lane >= warp:
            warp_count = 0
        at = at + T.warp_reduce_sum(warp_count)
        for u in T.unroll(UNITS):
            to = T.alloc_var(T.int32)
            to = at + part(before, u)
            for e in T.unroll(UNIT):
                if (passed[0] & bit(u * UNIT + e)) != T.uint32(0):
                    words[0, to] = word(values[u * UNIT + e])
                    ids[0, to] = (unit + u * WARP) * UNIT + e
                    to = to + 1
            at = at + part(other, u)

    @T.macro
    def guess(logits, row, begin, stop, bins, found, sums):
        """A bound that few more than `topk` entries are above, most likely; none below -inf, which
        NaN is too: numbers are compared with it."""
        tx = T.get_thread_binding()
        values = T.alloc_local((SAMPLED_UNITS * UNIT,), dtype)
        own = T.alloc_local((SAMPLED_UNITS * UNIT,), T.uint32)
        wanted = SAMPLE // (NEAR * UNIT)
        present = (stop // UNIT - begin // UNIT) // NEAR
        for u in T.unroll(SAMPLED_UNITS):
            number = (u * THREADS + tx) // NEAR
            chunk = number * (present // wanted) + number * (present % wanted) // wanted
            unit = begin // UNIT + chunk * NEAR + tx % NEAR
            load(logits, row, unit, stop, values, u * UNIT)
            for e in T.unroll(UNIT):
                own[u * UNIT + e] = T.uint32(0)
                if unit * UNIT + e >= begin:
                    own[u * UNIT + e] = key(word(values[u * UNIT + e]))
        rank = T.alloc_var(T.int32, init=topk * SAMPLE // (stop - begin))
        rank = rank + rank // 4 + SPARE_RANK
        threshold = T.alloc_var(T.uint32)
        threshold = least_of_sample(own, rank, 0, T.uint32(1), bins, found, sums)
        return T.if_then_else(threshold > T.uint32(LOWEST), threshold - T.uint32(1), T.uint32(0))

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
            T.annotate_min_blocks_per_sm(2 if capacity <= MAX_OWN * THREADS else 1)
            tx = T.get_thread_binding()
            lane = tx % WARP
            words = T.alloc_shared((1, capacity), T.uint32)
            ids = T.alloc_shared((1, capacity), T.int32)
            bins = T.alloc_shared((BINS,), T.int32)
            found = T.alloc_shared((FOUND,), T.int32)
            sums = T.alloc_shared((WARPS,), T.int32)
            warp_counts = T.alloc_shared((2, WARPS), T.int32)
            values = T.alloc_local((OWN,), dtype)
            coming = T.alloc_local((OWN,), dtype)
            begin = T.alloc_var(T.int32, init=0)
            stop = T.alloc_var(T.int32, init=columns)
            count = T.alloc_local((1,), T.int32)
            passed = T.alloc_local((1,), T.uint32)  # a bit for each logit of the thread
            bound = T.alloc_var(T.uint32, init=T.uint32(0))
            threshold = T.alloc_var(T.float32)  # the number above the bound
            unit = T.alloc_var(T.int32)  # the thread's first one in a tile
            again = T.alloc_var(T.bool, init=T.bool(True))
            if not named:
                stop = T.max(T.min(end[row], columns), 0)
            if with_start:
                begin = T.min(T.max(start[row], 0), columns)
            for c in T.unroll(BINS // THREADS):
                bins[c * THREADS + tx] = 0
            first = begin // UNIT * UNIT
            tiles = T.alloc_var(T.int32, init=T.ceildiv(stop - first, TILE))
            if not named and stop - begin > capacity:  # keys may all be absent
                T.sync_threads()
                bound = guess(logits, row, begin, stop, bins, found, sums)
            for _ in T.serial(2):
                if again:  # the same for all threads
                    T.sync_threads()
                    count[0] = 0
                    threshold = number_of(bound + T.uint32(1))
                    unit = begin // UNIT + tx // WARP * WARP * UNITS + lane
                    load_tile(logits, row, unit, stop, coming)
                    for tile in T.serial(tiles):
                        for e in T.unroll(OWN):
                            values[e] = coming[e]
                        load_tile(logits, row, unit + TILE // UNIT, stop, coming)
                        inner = first + tile * TILE >= begin and first + (tile + 1) * TILE <= stop
                        mark(values, unit, begin, stop, bound, threshold, inner, passed)
                        enter(values, unit, passed, tile % 2, warp_counts, words, ids, count)
                        unit = unit + TILE // UNIT
                        # Before the list cannot take another tile, and at the end.
                        if count[0] > T.if_then_else(tile + 1 == tiles, topk, capacity - TILE):
                            T.sync_threads()
                            bound = keep(
                                words, ids, 0, count[0], 0, bound, bins, found, sums, count
                            )
                            threshold = number_of(bound + T.uint32(1))
                            T.sync_threads()
                    again = count[0] < topk and bound > T.uint32(0)
                    bound = T.uint32(0)
            T.sync_threads()
            if by_value:
                sort(words, ids, 0, count[0])
            for c in T.serial(-(-topk // THREADS)):
                position = c * THREADS + tx
                if position < topk:
                    chosen = T.alloc_var(T.int32, init=-1)
                    if position < count[0]:
                        chosen = ids[0, position]
                        if named:
                            chosen = names[row, chosen]
                    out[row, position] = chosen

    return best_entries


# ---- few long rows -------------------------------------------------------------------------------


def part_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    fields = PartPlan(*static)
    return tuple(sorted({32, BITS[fields.dtype] * fields.vector})), 32


@kernel(access_bits=part_access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def best_of_parts(topk: int, dtype: str, vector: int) -> Any:
    """The best entries of each part of a row, in the order of the row, 0 and -1 after the last one.

    A block has a part of `PART` entries in registers. Each launch leaves shorter rows, of keys and
    names; in the last one there is one part, and keys are not written.
    """
    rows, columns, parts = T.dynamic("rows columns parts")
    named = dtype == KEYS
    own_entries = PART // THREADS
    prefix = prefix_over_block(THREADS)
    find = least_of_best(own_entries, THREADS)
    choose = entries_to_keep(own_entries, THREADS)

    @T.macro
    def load(logits, row, first, begin, stop, own):
        """Keys of the thread's entries, 0 for what is not in the row."""
        values = T.alloc_local((vector,), dtype)
        for c in T.unroll(own_entries // vector):
            index = first + c * vector
            if index < stop:
                for e in T.vectorized(vector):
                    values[e] = logits[row, index + e]
            for e in T.unroll(vector):
                own[c * vector + e] = T.uint32(0)
                if index + e >= begin and index + e < stop:
                    if named:
                        own[c * vector + e] = values[e]
                    else:
                        bits = T.reinterpret(T.cast(values[e], T.float32), T.uint32)
                        own[c * vector + e] = key_of_bits(bits)

    @T.prim_func
    def best_entries_of_parts(
        logits: T.Tensor[(rows, columns), dtype],
        start: T.Tensor[(rows,), T.int32],
        end: T.Tensor[(rows,), T.int32],
        names: T.Tensor[(rows, columns), T.int32],
        out: T.Tensor[(rows, parts, topk), T.int32],
        out_keys: T.Tensor[(rows, parts, topk), T.uint32],
    ):
        with T.Kernel(rows, parts, threads=THREADS) as (row, part):
            T.assume(columns % vector == 0)
            tx = T.get_thread_binding()
            bins = T.alloc_shared((BINS,), T.int32)
            found = T.alloc_shared((FOUND,), T.int32)
            sums = T.alloc_shared((WARPS,), T.int32)
            own = T.alloc_local((own_entries,), T.uint32)
            stays = T.alloc_local((-(-own_entries // 32),), T.uint32)
            before = T.alloc_local((2,), T.int32)
            kept = T.alloc_local((1,), T.int32)
            begin = T.alloc_var(T.int32, init=0)
            stop = T.alloc_var(T.int32, init=columns)
            present = T.alloc_var(T.int32, init=0)
            bound = T.alloc_var(T.uint32, init=T.uint32(1))  # below every key
            first = part * PART + tx * own_entries
            if not named:
                begin = start[row]
                stop = T.min(end[row], columns)
            for c in T.unroll(BINS // THREADS):
                bins[c * THREADS + tx] = 0
            load(logits, row, first, begin, stop, own)
            for j in T.unroll(own_entries):
                if own[j] > T.uint32(0):
                    present = present + 1
            prefix(present, sums, before)
            T.sync_threads()
            if before[1] > topk:  # the same for all threads
                bound = find(own, topk, 0, T.uint32(1), bins, found, sums)
            choose(own, bound, topk, sums, stays, before, kept)
            index = T.alloc_var(T.int32, init=before[0])
            for j in T.unroll(own_entries):
                if (stays[j // 32] & bit(j)) != T.uint32(0):
                    if named:
                        out[row, part, index] = names[row, first + j]
                    else:
                        out[row, part, index] = first + j
                    if parts > 1:
                        out_keys[row, part, index] = own[j]
                    index = index + 1
            for c in T.serial(-(-topk // THREADS)):
                if c * THREADS + tx >= kept[0] and c * THREADS + tx < topk:
                    out[row, part, c * THREADS + tx] = -1
                    if parts > 1:
                        out_keys[row, part, c * THREADS + tx] = T.uint32(0)

    return best_entries_of_parts
