"""The best keys of each query, from scores that never leave shared memory.

A block streams over the keys of its queries as the scores do, and each query has a list of the best
keys so far (see `indexer_list`). Where there are few queries, blocks share the keys, and the lists
that they leave are merged as rows of logits are.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.kernels.indexer_list import (
    COUNTERS,
    NO_TYPED_SYNC,
    VECTOR,
    keep_best,
    key_of,
)
from tile_kernels.attention.kernels.indexer_logits import MARKED, MARKING
from tile_kernels.attention.kernels.indexer_scores import (
    E2M1,
    Tile,
    dot,
    load_queries,
    scores_of,
    stream_keys,
    tile_plan,
)
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

MOST_KEYS = 128  # of a tile
MOST_QUERIES = 4  # a warp each, also of the smallest block


class Plan(NamedTuple):
    """A tile's numbers; entries of a list; whether it is one of several; which blocks, as in
    `indexer_logits`."""

    source: str
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
    source: str, heads: int, depth: int, topk: int, partial: bool, role: str, device: Device
) -> Plan:
    quantum = 2 * MOST_KEYS * VECTOR
    capacity = -(-(topk + 2 * MOST_KEYS) // quantum) * quantum
    exact = role == MARKED
    tile = tile_plan(source, exact, heads, depth, 8 * capacity, MOST_QUERIES, device)
    return Plan(*tile, topk, capacity, partial, role)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    return (8, 32, 64, 128) if Plan(*static).source == E2M1 else (32, 64, 128), 32


@kernel(plan=plan, access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def best_keys(*static: Any) -> Any:
    """Some queries and `share_keys` keys for a block, a multiple of 128.

    The last queries come first: with causal ranges they take longest.
    """
    made = Plan(*static)
    tile, role = Tile(*static[: len(Tile._fields)]), made.role
    heads, keys, queries, stages = tile.heads, tile.keys, tile.queries, tile.stages
    topk, capacity = made.topk, made.capacity
    packed = tile.source == E2M1
    width, element = tile.row
    tokens, num_keys, shares = T.dynamic("tokens num_keys shares")
    q_scales = (tokens, heads, tile.groups)
    k_scales = (num_keys, tile.groups) if packed else (num_keys,)
    load = load_queries(tile)
    fetch, fetch_exponents, arrive = stream_keys(tile)
    dotted = dot(tile)
    scaled = scores_of(tile)
    keep = keep_best(topk, capacity, tile.threads)

    @T.macro
    def append(of_scores, number, bounds, best, ids, counts, floors):
        """What is above the bound of its query's list: a warp per query, keys in order."""
        t = T.get_thread_binding() // WARP
        lane = T.get_thread_binding() % WARP
        count = T.alloc_var(T.int32)
        entry = T.alloc_var(T.uint32)
        holders = T.alloc_var(T.uint32)
        if t < queries:
            count = counts[t]
            for c in T.unroll(keys // WARP):
                key = number * keys + c * WARP + lane
                entry = T.uint32(0)
                if key >= bounds[0, t] and key < bounds[1, t]:
                    entry = key_of(of_scores[t, c * WARP + lane])
                holders = T.cast(T.ballot(entry > floors[t]), T.uint32)
                if entry > floors[t]:
                    below = (T.uint32(1) << T.cast(lane, T.uint32)) - T.uint32(1)
                    place = count + T.cast(T.popcount(holders & below), T.int32)
                    best[t, place] = entry
                    ids[t, place] = key
                count = count + T.cast(T.popcount(holders), T.int32)
            if lane == 0:
                counts[t] = count

    @T.prim_func
    def best_of_queries(
        q: T.Tensor[(tokens, heads, width), element],
        q_sf: T.Tensor[q_scales, T.uint8],
        k: T.Tensor[(num_keys, width), element],
        k_sf: T.Tensor[k_scales, T.uint8 if packed else T.float32],
        weights: T.Tensor[(tokens, heads), T.float32],
        start: T.Tensor[(tokens,), T.int32],
        end: T.Tensor[(tokens,), T.int32],
        marks: T.Tensor[(tokens, shares), T.int32],
        out: T.Tensor[(tokens, shares, topk), T.int32],
        out_keys: T.Tensor[(tokens, shares, topk), T.uint32],
        share_keys: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(tokens, queries), T.ceildiv(num_keys, share_keys), threads=tile.threads
        ) as (block, share):
            T.annotate_min_blocks_per_sm(1 if role == MARKED else 2)
            tx = T.get_thread_binding()
            of_queries = T.alloc_shared((1, tile.columns, tile.depth), tile.unit)
            of_keys = T.alloc_shared((tile.slots, keys, tile.depth), tile.unit)
            raw = T.alloc_shared((stages, keys, width if tile.expanded else 1), element)
            q_factors = T.alloc_shared((1, tile.columns), T.float32)
            k_factors = T.alloc_shared((stages, keys), T.float32)
            bounds = T.alloc_shared((2, queries), T.int32)
            of_scores = T.alloc_shared((queries, keys), T.float32)
            best = T.alloc_shared((queries, capacity), T.uint32)
            ids = T.alloc_shared((queries, capacity), T.int32)
            counts = T.alloc_shared((queries,), T.int32)
            floors = T.alloc_shared((queries,), T.uint32)
            counters = T.alloc_shared((COUNTERS,), T.int32)
            of_warps = T.alloc_shared((tile.threads // WARP,), T.int32)
            wide = T.alloc_shared((1,), T.int32)
            of_weights = T.alloc_fragment((tile.columns,), T.float32)
            products = T.alloc_fragment((keys, tile.columns), T.float32)
            by_head = T.reshape(products, (keys, queries, tile.padded))
            sums = T.alloc_fragment((keys, queries), T.float32)
            exponents = T.alloc_local((1,), T.uint32)
            least = T.alloc_var(T.int32, init=num_keys)
            most = T.alloc_var(T.int32, init=0)
            wanted = T.alloc_var(T.int32, init=1)
            count = T.alloc_var(T.int32)
            floor = T.alloc_var(T.uint32)
            first = T.alloc_var(T.int32)
            first = (T.ceildiv(tokens, queries) - 1 - block) * queries
            if role == MARKED:
                wanted = 0
                for t in T.serial(queries):
                    if first + t < tokens:
                        wanted = T.max(wanted, marks[first + t, share])
            if wanted != 0:
                if tx == 0:
                    wide[0] = 0
                if tx < queries:
                    counts[tx] = 0
                    floors[tx] = T.uint32(0)
                    bounds[0, tx] = 0
                    bounds[1, tx] = 0
                    if first + tx < tokens:
                        bounds[0, tx] = T.max(start[first + tx], 0)
                        bounds[1, tx] = T.min(end[first + tx], num_keys)
                T.sync_threads()
                load(q, q_sf, weights, first, tokens, of_queries, q_factors, of_weights, wide)
                for t in T.serial(queries):
                    if bounds[0, t] < bounds[1, t]:
                        least = T.min(least, bounds[0, t])
                        most = T.max(most, bounds[1, t])
                tiles = share_keys // keys
                begin = T.alloc_var(T.int32, init=T.max(share * tiles, least // keys))
                last = T.alloc_var(T.int32, init=T.min((share + 1) * tiles, T.ceildiv(most, keys)))
                for i in T.serial(stages - 1):
                    fetch(k, k_sf, begin + i, last, of_keys, raw, k_factors)
                fetch_exponents(k_sf, num_keys, begin, last, exponents)
                # Once more than there are tiles: then for the lists alone.
                for number in T.serial(begin, last + 1):
                    if number < last:
                        fetch(k, k_sf, number + stages - 1, last, of_keys, raw, k_factors)
                        arrive(number, of_keys, raw, k_factors, exponents, wide)
                        fetch_exponents(k_sf, num_keys, number + 1, last, exponents)
                    else:
                        T.sync_threads()
                    for t in T.serial(queries):
                        count = counts[t]
                        if count > T.if_then_else(number < last, capacity - keys, topk):
                            floor = keep(best, ids, t, count, counters, of_warps)
                            if tx == 0:
                                counts[t] = topk
                                floors[t] = floor
                    if number < last:
                        slot = number % tile.slots
                        dotted(of_keys, slot, of_queries, products, by_head, of_weights, sums)
                        scaled(sums, k_factors, number, of_scores)
                        T.sync_threads()
                        append(of_scores, number, bounds, best, ids, counts, floors)
                T.sync_threads()
                for t in T.serial(queries):
                    for c in T.serial(-(-topk // tile.threads)):
                        place = c * tile.threads + tx
                        if first + t < tokens and place < topk:
                            out[first + t, share, place] = T.if_then_else(
                                place < counts[t], ids[t, place], -1
                            )
                            if made.partial:
                                out_keys[first + t, share, place] = T.if_then_else(
                                    place < counts[t], best[t, place], T.uint32(0)
                                )
                if role == MARKING:
                    if tx < queries and first + tx < tokens:
                        marks[first + tx, share] = wide[0]

    return best_of_queries
