"""The best keys of each query, from scores that never leave shared memory.

A block streams over the keys of its queries as the scores do, and each query has a list of the best
keys so far (see `indexer_list`). Where there are few queries, blocks share the keys, and the lists
that they leave are merged as rows of logits are.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.kernels.indexer_list import (
    BINS,
    FOUND,
    NO_TYPED_SYNC,
    bit,
    keep_best,
    key_of,
    list_entries,
)
from tile_kernels.attention.kernels.indexer_logits import MARKED, MARKING
from tile_kernels.attention.kernels.indexer_scores import (
    E2M1,
    Tile,
    load_queries,
    marks_of,
    product,
    query_ranges,
    scores_of,
    shared_memory,
    stream_keys,
    tile_plan,
)
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

MOST_QUERIES = 4
OWN = 16  # keys of a warp, whose scores it has
ENTRY_BYTES = 8
SPARE = 64  # entries that a list may keep beside the best before the end, which is less work
SPARE_TILES = 5  # of keys that a list has room for beside those it must: it fills up less often
MOST_OWN = 18  # entries of a list for each thread, if there is more room


class Plan(NamedTuple):
    """A tile's numbers; entries of a list; whether it is one of several; which blocks, as in
    `indexer_logits`."""

    source: str
    of_keys: str
    unit: str
    heads: int
    padded: int
    depth: int
    keys: int
    queries: int
    stages: int
    fenced: bool
    topk: int
    capacity: int
    partial: bool
    role: str


def plan(
    source: str,
    of_keys: str,
    heads: int,
    depth: int,
    topk: int,
    partial: bool,
    role: str,
    device: Device,
) -> Plan:
    def least(keys: int) -> int:
        """Entries of a list for each thread: for the best, a tile, and some more."""
        return list_entries(topk + (1 + SPARE_TILES) * keys, 2 * keys)

    tile, left = tile_plan(
        source, of_keys, role == MARKED, heads, depth, MOST_QUERIES, device,
        held=lambda keys: ENTRY_BYTES * 2 * keys * least(keys), shared=4 * BINS,
    )  # fmt: skip
    entries = least(tile.keys)
    most = entries + left // (ENTRY_BYTES * tile.threads * tile.queries)
    while (more := list_entries((entries + 1) * tile.threads, tile.threads)) <= min(most, MOST_OWN):
        entries = more
    return Plan(*tile, topk, entries * tile.threads, partial, role)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    return (8, 32, 128) if Plan(*static).source == E2M1 else (32, 128), 32


@kernel(plan=plan, access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def best_keys(*static: Any) -> Any:
    """Some queries and `share_keys` keys for a block, a multiple of 128.

    The last queries come first: with causal ranges they take longest.
    """
    made = Plan(*static)
    tile, role = Tile(*static[: len(Tile._fields)]), made.role
    heads, keys, queries = tile.heads, tile.keys, tile.queries
    topk, capacity = made.topk, made.capacity
    warps, rounds = tile.threads // WARP, -(-OWN * queries // WARP)
    (width, element), (k_width, k_element) = tile.row(tile.source), tile.row(tile.of_keys)
    tokens, num_keys, shares, marked_tiles = T.dynamic("tokens num_keys shares marked_tiles")
    q_scales = (tokens, heads, tile.groups)
    k_scales = (num_keys, tile.groups) if tile.packed else (num_keys,)
    load = load_queries(tile)
    load_ranges, span = query_ranges(tile)
    some_marked, marked, begin_marks = marks_of(tile)
    open_stream, arrive, forward = stream_keys(tile)
    start_product, finish_product = product(tile)
    scaled = scores_of(tile)
    keep = keep_best(topk, capacity, tile.threads, lambda word: word)

    @T.macro
    def offer(of_scores, number, bounds, floors, offered, places, passed):
        """Scores of a warp's keys that are above the bound of their query's list, 0 for others:
        one for each lane and round, their places among the warp's, and how many there are."""
        warp = T.get_thread_binding() // WARP
        lane = T.get_thread_binding() % WARP
        holders = T.alloc_var(T.uint32)  # a bit for each key
        for c in T.unroll(rounds):
            t = c * (WARP // OWN) + lane // OWN
            key = number * keys + warp * OWN + lane % OWN
            offered[c] = T.uint32(0)
            if t < queries and key >= bounds[0, t] and key < bounds[1, t]:
                offered[c] = key_of(of_scores[number % 2, t, warp * OWN + lane % OWN])
                if offered[c] <= floors[t]:
                    offered[c] = T.uint32(0)
            holders = T.cast(T.ballot(offered[c] > T.uint32(0)), T.uint32)
            holders = (holders >> T.cast(lane // OWN * OWN, T.uint32)) & T.uint32(2**OWN - 1)
            places[c] = T.cast(T.popcount(holders & (bit(lane % OWN) - 1)), T.int32)
            if t < queries and lane % OWN == 0:
                passed[number % 2, t, warp] = T.cast(T.popcount(holders), T.int32)

    @T.macro
    def enter(number, offered, places, passed, best, ids, counts):
        """Append what was offered to the lists, keys in order.

        Counts are those before a tile and after it, in turn: all threads look at them."""
        warp = T.get_thread_binding() // WARP
        lane = T.get_thread_binding() % WARP
        of_warps = T.alloc_local((warps,), T.int32)
        count = T.alloc_var(T.int32)
        place = T.alloc_var(T.int32)
        for c in T.unroll(rounds):
            t = c * (WARP // OWN) + lane // OWN
            if t < queries:
                for w in T.unroll(warps // 4):
                    for e in T.vectorized(4):
                        of_warps[w * 4 + e] = passed[number % 2, t, w * 4 + e]
                count = counts[(number + 1) % 2, t]
                place = count + places[c]
                for w in T.unroll(warps):
                    count = count + of_warps[w]
                    if w < warp:
                        place = place + of_warps[w]
                if offered[c] > T.uint32(0):
                    best[t, place] = offered[c]
                    ids[t, place] = number * keys + warp * OWN + lane % OWN
                if warp == 0 and lane % OWN == 0:
                    counts[number % 2, t] = count

    @T.macro
    def shorten(best, ids, t, turn, spare, counts, floors, bins, found, of_warps):
        """Keep the best of a list, and up to `spare` more; a barrier at the end."""
        count = T.alloc_var(T.int32, init=counts[turn, t])
        floor = T.alloc_var(T.uint32)
        kept = T.alloc_local((1,), T.int32)
        floor = keep(best, ids, t, count, spare, floors[t], bins, found, of_warps, kept)
        if T.get_thread_binding() == 0:
            counts[turn, t] = kept[0]
            floors[t] = floor
        T.sync_threads()

    @T.prim_func
    def best_of_queries(
        q: T.Tensor[(tokens, heads, width), element],
        q_sf: T.Tensor[q_scales, T.uint8],
        k: T.Tensor[(num_keys, k_width), k_element],
        k_sf: T.Tensor[k_scales, T.uint8 if tile.packed else T.float32],
        k_marks: T.Tensor[(marked_tiles, 1), T.int32],
        weights: T.Tensor[(tokens, heads), T.float32],
        start: T.Tensor[(tokens,), T.int32],
        end: T.Tensor[(tokens,), T.int32],
        marks: T.Tensor[(tokens, shares), T.int32],
        out: T.Tensor[(tokens, shares, topk), T.int32],
        out_keys: T.Tensor[(tokens, shares, topk), T.uint32],
        share_keys: T.int32,
        block_queries: T.int32,
    ):
        turns = T.max(block_queries // queries, 1) if role == MARKED else 1
        with T.Kernel(
            T.ceildiv(tokens, turns * queries),
            T.ceildiv(num_keys, share_keys),
            threads=tile.threads,
        ) as (block, share):
            T.annotate_min_blocks_per_sm(tile.blocks)
            tx = T.get_thread_binding()
            of_queries, of_keys, raw, q_factors, of_weights, k_factors, bounds, of_scores = (
                shared_memory(tile)
            )
            best = T.alloc_shared((queries, capacity), T.uint32)
            ids = T.alloc_shared((queries, capacity), T.int32)
            counts = T.alloc_shared((2, queries), T.int32)
            passed = T.alloc_shared((2, queries, warps), T.int32)
            offered = T.alloc_local((rounds,), T.uint32)
            places = T.alloc_local((rounds,), T.int32)
            floors = T.alloc_shared((queries,), T.uint32)
            bins = T.alloc_shared((BINS,), T.int32)
            found = T.alloc_shared((FOUND,), T.int32)
            of_warps = T.alloc_shared((tile.threads // WARP,), T.int32)
            wide = T.alloc_shared((1,), T.int32)
            products = T.alloc_fragment((keys, tile.columns), T.float32)
            by_head = T.reshape(products, (keys, queries, tile.padded))
            sums = T.alloc_fragment((keys, queries), T.float32)
            words = T.alloc_local((4 * tile.rounds,), T.uint32)
            exponents = T.alloc_local((tile.rounds,), T.int32)
            between = T.alloc_local((2,), T.int32)
            wanted = T.alloc_var(T.bool, init=T.bool(True))
            first = T.alloc_var(T.int32)
            some = T.alloc_var(T.int32, init=turns)
            if role == MARKED:
                if not some_marked(
                    marks, block * turns * queries, turns * queries, tokens, share, wide
                ):
                    some = 0
            for turn in T.serial(some if role == MARKED else 1):
                first = (block * turns + turn) * queries
                if role != MARKED:
                    first = (T.ceildiv(tokens, queries) - 1 - block) * queries
                if role == MARKED:
                    T.sync_threads()
                    wanted = marked(marks, first, tokens, share)
                if wanted:
                    begin_marks(k_marks, num_keys, share, share_keys, wide)
                    if tx < queries:
                        counts[0, tx] = 0
                        counts[1, tx] = 0
                        floors[tx] = T.uint32(0)
                    for c in T.unroll(BINS // tile.threads):
                        bins[c * tile.threads + tx] = 0
                    for c in T.unroll(rounds):
                        offered[c] = T.uint32(0)
                        places[c] = 0
                    load_ranges(start, end, first, tokens, num_keys, bounds)
                    T.sync_threads()
                    load(q, q_sf, weights, first, tokens, of_queries, q_factors, of_weights, wide)
                    span(bounds, num_keys, share, share_keys // keys, between)
                    begin = T.alloc_var(T.int32, init=between[0])
                    last = T.alloc_var(T.int32, init=between[1])
                    open_stream(
                        k, k_sf, num_keys, begin, last, of_keys, raw, k_factors, words, exponents,
                        wide,
                    )  # fmt: skip
                    for number in T.serial(begin, last):
                        arrive(number, last, of_keys, raw, k_factors, words, exponents, wide)
                        for t in T.serial(queries):
                            if counts[(number + 1) % 2, t] > capacity - keys:
                                shorten(
                                    best, ids, t, (number + 1) % 2, SPARE, counts, floors, bins,
                                    found, of_warps,
                                )  # fmt: skip
                        start_product(of_keys, number % tile.slots, of_queries, products)
                        forward(
                            k, k_sf, num_keys, number, last, of_keys, raw, k_factors, words,
                            exponents, wide,
                        )  # fmt: skip
                        if number > begin + 1:
                            enter(number - 2, offered, places, passed, best, ids, counts)
                        if number > begin:
                            offer(of_scores, number - 1, bounds, floors, offered, places, passed)
                        finish_product(products, by_head, of_weights, sums)
                        scaled(sums, k_factors, number, of_scores)
                    for number in T.serial(last, last + 3):  # two tiles to enter, and the end
                        T.sync_threads()
                        for t in T.serial(queries):
                            if counts[(number + 1) % 2, t] > T.if_then_else(
                                number == last + 2, topk, capacity - keys
                            ):
                                shorten(
                                    best, ids, t, (number + 1) % 2, 0, counts, floors, bins, found,
                                    of_warps,
                                )  # fmt: skip
                        if number < last + 2 and number - 2 >= begin:
                            enter(number - 2, offered, places, passed, best, ids, counts)
                        if number == last and begin < last:
                            offer(of_scores, last - 1, bounds, floors, offered, places, passed)
                    for t in T.serial(queries):
                        for c in T.serial(-(-topk // tile.threads)):
                            place = c * tile.threads + tx
                            if first + t < tokens and place < topk:
                                present = place < counts[(last - 1) % 2, t]
                                out[first + t, share, place] = T.if_then_else(
                                    present, ids[t, place], -1
                                )
                                if made.partial:
                                    out_keys[first + t, share, place] = T.if_then_else(
                                        present, best[t, place], T.uint32(0)
                                    )
                    if role == MARKING:
                        if tx < queries and first + tx < tokens:
                            marks[first + tx, share] = wide[0]

    return best_of_queries
