"""The best keys of each query, from scores that never leave shared memory.

A block streams over the keys of its queries as `score_tiles` does, and each query has a list of the
best keys so far (see `list_primitives`). Where there are few queries, blocks share the keys, and
the lists that they leave are merged as rows of logits are.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer_plan import BINS, E2M1, MARKED, MARKING, with_tile
from tile_kernels.attention.list_primitives import FOUND, NO_TYPED_SYNC, keep_best, key_of
from tile_kernels.attention.score_primitives import (
    SharedTiles,
    Work,
    registers,
    score_macros,
    score_types,
    shared_memory,
)
from tile_kernels.attention.select.plan import SLOTS, SPARE, TOGETHER, Plan
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

ALL_BYTES = 0x01010101


def sum_of_bytes(word: Any, factors: Any, start: Any) -> Any:
    """`start`, and bytes of a word times those of `factors`; all below 128."""
    return T.call_extern(T.int32, "__dp4a", word, factors, start)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    return (8, 32, 128) if with_tile(Plan, static).tile.source == E2M1 else (32, 128), 32


@kernel(access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def best_keys(*static: Any) -> Any:
    """Some queries and `share_keys` keys for a block, a multiple of 128.

    The last queries come first: with causal ranges they take longest.
    """
    tile, topk, capacity, short, role = with_tile(Plan, static)
    keys, queries = tile.keys, tile.queries
    warps, lanes = tile.threads // WARP, WARP // queries  # of a query
    per = TOGETHER * queries * keys // tile.threads  # keys of a query that a thread takes at a time
    warp_scores, vector = lanes * per, min(4, per)
    types, steps = score_types(tile), score_macros(tile)
    tokens, num_keys, shares = types.tokens, types.num_keys, types.shares
    ids_in = "uint16" if short else "int32"
    keep = keep_best(topk, capacity, tile.threads, lambda word: word, ids_in)

    @T.macro
    def slot_of(i):
        """Of the scores of the `i`-th tile: the first of those that lists take together has two in
        turn, the others one each."""
        slot = T.alloc_var(T.int32, init=i % TOGETHER)
        if slot == 0:
            slot = i // TOGETHER % 2 * TOGETHER
        return slot

    @T.macro
    def offer(score_tiles, i, number, last, bounds, inner, floors, offered, index, passed):
        """Of the scores of some tiles, from the `i`-th on, which is `number`: what is above the
        bound of its query's list, 0 for others, as many for each thread; where its first goes
        among those of the warp, and how many these are. `inner`: all keys are in range."""
        warp = T.get_thread_binding() // WARP
        lane = T.get_thread_binding() % WARP
        t = lane // lanes
        offset = warp * warp_scores + lane % lanes * per
        slot = T.alloc_var(T.int32, init=offset // keys)
        key = T.alloc_var(T.int32, init=number * keys + offset)
        values = T.alloc_local((per,), T.float32)
        stop = T.alloc_var(T.int32)
        passing = T.alloc_var(T.int32, init=0)
        other = T.alloc_var(T.int32)
        if slot == 0:
            slot = slot_of(i)
        for c in T.unroll(per // vector):
            for e in T.vectorized(vector):
                values[c * vector + e] = score_tiles[slot, t, offset % keys + c * vector + e]
        for j in T.unroll(per):
            offered[j] = key_of(values[j])
        if not inner:
            stop = T.min(bounds[1, t], last * keys)
            for j in T.unroll(per):
                if key + j < bounds[0, t] or key + j >= stop:
                    offered[j] = T.uint32(0)
        for j in T.unroll(per):
            if offered[j] > floors[t]:
                passing = passing + 1
            else:
                offered[j] = T.uint32(0)
        index[0] = -passing
        for d in T.unroll(lanes.bit_length() - 1):
            other = T.shfl_up(passing, T.shift_left(1, d), lanes)
            if lane % lanes >= T.shift_left(1, d):
                passing = passing + other
        index[0] = index[0] + passing
        if lane % lanes == lanes - 1:
            passed[t, warp] = T.cast(passing, T.uint8)

    @T.macro
    def enter(number, iteration, offered, index, passed, best, ids, counts):
        """Append what was offered to the lists, keys in order; `number` from the block's first on.

        Counts are those before and after, in turn: all threads look at them."""
        warp = T.get_thread_binding() // WARP
        lane = T.get_thread_binding() % WARP
        t = lane // lanes
        warp_counts = T.alloc_local((warps,), T.uint8)
        words = T.view(warp_counts, (warps // 4,), T.int32)
        count = T.alloc_var(T.int32, init=counts[iteration, t])
        at = T.alloc_var(T.int32, init=count + index[0])
        for w in T.vectorized(warps):
            warp_counts[w] = passed[t, w]
        for w in T.unroll(warps // 4):
            # Bytes below that of the warp, of four warps.
            lower = T.alloc_var(T.int32, init=ALL_BYTES)
            if warp < 4 * w:
                lower = 0
            elif warp < 4 * w + 4:
                lower = ALL_BYTES & (T.shift_left(1, warp % 4 * 8) - 1)
            count = sum_of_bytes(words[w], ALL_BYTES, count)
            at = sum_of_bytes(words[w], lower, at)
        for j in T.unroll(per):
            if offered[j] > T.uint32(0):
                best[t, at] = offered[j]
                ids[t, at] = T.cast(
                    number * keys + warp * warp_scores + lane % lanes * per + j, ids_in
                )
                at = at + 1
        if warp == 0 and lane % lanes == 0:
            counts[1 - iteration, t] = count

    @T.macro
    def shorten(best, ids, t, iteration, spare, counts, floors, bins, found, warp_counts):
        """Keep the best of a list, and up to `spare` more; a barrier at the end."""
        count = T.alloc_var(T.int32, init=counts[iteration, t])
        floor = T.alloc_var(T.uint32)
        kept = T.alloc_local((1,), T.int32)
        floor = keep(best, ids, t, count, spare, floors[t], bins, found, warp_counts, kept)
        if T.get_thread_binding() == 0:
            counts[iteration, t] = kept[0]
            floors[t] = floor
        T.sync_threads()

    @T.macro
    def make_room(limit, now, spare, best, ids, counts, floors, bins, found, warp_counts):
        """Shorten the lists that have more than `limit` entries."""
        for t in T.serial(queries):
            if counts[now, t] > limit:
                shorten(best, ids, t, now, spare, counts, floors, bins, found, warp_counts)

    @T.prim_func
    def best_of_queries(
        q: types.q, q_sf: types.q_sf, k: types.k, k_sf: types.k_sf, k_marks: types.k_marks,
        weights: types.weights, start: types.start, end: types.end, marks: types.marks,
        out: T.Tensor[(tokens, shares, topk), T.int32],
        out_keys: T.Tensor[(tokens, shares, topk), T.uint32],
        share_keys: T.int32,
        block_queries: T.int32,
    ):  # fmt: skip
        iterations = T.max(block_queries // queries, 1) if role == MARKED else 1
        with types.grid(tile, iterations, share_keys) as (block, share):
            T.annotate_min_blocks_per_sm(tile.blocks)
            tx = T.get_thread_binding()
            shared = SharedTiles(*shared_memory(tile, SLOTS))
            best = T.alloc_shared((queries, capacity), T.uint32)
            ids = T.alloc_shared((queries, capacity), ids_in)
            counts = T.alloc_shared((2, queries), T.int32)
            passed = T.alloc_shared((queries, warps), T.uint8)
            offered = T.alloc_local((per,), T.uint32)
            index = T.alloc_local((1,), T.int32)
            floors = T.alloc_shared((queries,), T.uint32)
            bins = T.alloc_shared((BINS,), T.int32)
            found = T.alloc_shared((FOUND,), T.int32)
            warp_counts = T.alloc_shared((tile.threads // WARP,), T.int32)
            work = Work(*registers(tile))
            wanted = T.alloc_var(T.bool, init=T.bool(True))
            first = T.alloc_var(T.int32)
            num_iterations = T.alloc_var(T.int32, init=iterations)
            if role == MARKED:
                if not steps.any_marked(
                    marks,
                    block * iterations * queries,
                    iterations * queries,
                    tokens,
                    share,
                    work.wide,
                ):
                    num_iterations = 0
            for iteration in T.serial(num_iterations if role == MARKED else 1):
                first = (block * iterations + iteration) * queries
                if role != MARKED:
                    first = (T.ceildiv(tokens, queries) - 1 - block) * queries
                if role == MARKED:
                    T.sync_threads()
                    wanted = steps.marked(marks, first, tokens, share)
                if wanted:
                    steps.begin_marks(k_marks, num_keys, share, share_keys, work.wide)
                    if tx < queries:
                        counts[0, tx] = 0
                        counts[1, tx] = 0
                        floors[tx] = T.uint32(0)
                    for c in T.unroll(BINS // tile.threads):
                        bins[c * tile.threads + tx] = 0
                    for c in T.unroll(per):
                        offered[c] = T.uint32(0)
                    index[0] = 0
                    steps.begin(
                        q, q_sf, weights, start, end, first, tokens, num_keys, share, share_keys,
                        shared, work,
                    )  # fmt: skip
                    begin = T.alloc_var(T.int32, init=work.between[0])
                    last = T.alloc_var(T.int32, init=work.between[1])
                    steps.open_stream(k, k_sf, num_keys, begin, last, shared, work)
                    # Keys in range of all queries.
                    low = T.alloc_var(T.int32, init=shared.bounds[0, 0])
                    high = T.alloc_var(T.int32, init=T.min(shared.bounds[1, 0], last * keys))
                    for t in T.unroll(queries - 1):
                        low = T.max(low, shared.bounds[0, t + 1])
                        high = T.min(high, shared.bounds[1, t + 1])
                    for i in T.serial(last - begin):
                        number = T.alloc_var(T.int32, init=begin + i)
                        steps.arrive(number, begin, last, shared, work)
                        now = i // TOGETHER % 2
                        if i % TOGETHER == 1:
                            make_room(
                                capacity - TOGETHER * keys, now, SPARE, best, ids, counts, floors,
                                bins, found, warp_counts,
                            )  # fmt: skip
                        steps.start_product(number % tile.slots, shared, work)
                        steps.forward(k, k_sf, num_keys, number, last, shared, work)
                        if i >= TOGETHER and i % TOGETHER == 0:
                            offer(
                                shared.scores, i - TOGETHER, number - TOGETHER, last, shared.bounds,
                                (number - TOGETHER) * keys >= low and number * keys <= high,
                                floors, offered, index, passed,
                            )  # fmt: skip
                        elif i > TOGETHER and i % TOGETHER == 1:
                            enter(i - 1 - TOGETHER, now, offered, index, passed, best, ids, counts)
                        steps.finish_product(shared, work)
                        steps.scaled(number, shared, work, slot_of(i))
                    tiles = T.alloc_var(T.int32, init=T.max(last - begin, 0))
                    whole = T.alloc_var(T.int32, init=T.ceildiv(tiles, TOGETHER) * TOGETHER)
                    ending = T.alloc_var(T.int32, init=(whole // TOGETHER + 1) % 2)
                    for i in T.serial(tiles, whole + 3):  # what is left to enter, and the end
                        T.sync_threads()
                        now = T.if_then_else(i == whole + 2, ending, i // TOGETHER % 2)
                        if i % TOGETHER == 1 or i == whole + 2:
                            make_room(
                                T.if_then_else(i == whole + 2, topk, capacity - TOGETHER * keys),
                                now, 0, best, ids, counts, floors, bins, found, warp_counts,
                            )  # fmt: skip
                        if i >= TOGETHER and i % TOGETHER == 0:
                            offer(
                                shared.scores, i - TOGETHER, begin + i - TOGETHER, last,
                                shared.bounds, False, floors, offered, index, passed,
                            )  # fmt: skip
                        elif i > TOGETHER and i % TOGETHER == 1:
                            enter(i - 1 - TOGETHER, now, offered, index, passed, best, ids, counts)
                    for t in T.serial(queries):
                        for c in T.serial(-(-topk // tile.threads)):
                            position = c * tile.threads + tx
                            if first + t < tokens and position < topk:
                                present = position < counts[ending, t]
                                out[first + t, share, position] = T.if_then_else(
                                    present, begin * keys + T.cast(ids[t, position], T.int32), -1
                                )
                                if shares > 1:  # one of several lists, which are merged
                                    out_keys[first + t, share, position] = T.if_then_else(
                                        present, best[t, position], T.uint32(0)
                                    )
                    if role == MARKING:
                        if tx < queries and first + tx < tokens:
                            marks[first + tx, share] = work.wide[0]

    return best_of_queries
