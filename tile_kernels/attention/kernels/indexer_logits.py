"""The scores of all keys for all queries, `-inf` outside of a query's range."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.kernels.indexer_list import NO_TYPED_SYNC
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
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

MOST_QUERIES = 16
BITS = {"float32": 32, "bfloat16": 16}
ALL, MARKING, MARKED = "all", "marking", "marked"


class Plan(NamedTuple):
    """A tile's numbers, then the dtype of logits, and which blocks: `all`, which are right; all,
    `marking` those that are not; those that are `marked`."""

    source: str
    unit: str
    heads: int
    padded: int
    depth: int
    keys: int
    queries: int
    stages: int
    fenced: bool
    out_dtype: str
    role: str


def plan(source: str, heads: int, depth: int, out_dtype: str, role: str, device: Device) -> Plan:
    tile = tile_plan(source, role == MARKED, heads, depth, 0, MOST_QUERIES, device)
    return Plan(*tile, out_dtype, role)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    made = Plan(*static)
    loads = (8, 32, 64, 128) if made.source == E2M1 else (32, 64, 128)
    return loads, BITS[made.out_dtype]


@kernel(plan=plan, access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def score_tiles(*static: Any) -> Any:
    """A block has some queries and a share of the keys, `share_keys`, a multiple of 128."""
    made = Plan(*static)
    tile, role = Tile(*static[: len(Tile._fields)]), made.role
    heads, keys, queries, stages = tile.heads, tile.keys, tile.queries, tile.stages
    packed = tile.source == E2M1
    width, element = tile.row
    tokens, num_keys, shares = T.dynamic("tokens num_keys shares")
    q_scales = (tokens, heads, tile.groups)
    k_scales = (num_keys, tile.groups) if packed else (num_keys,)
    load = load_queries(tile)
    fetch, fetch_exponents, arrive = stream_keys(tile)
    dotted = dot(tile)
    scaled = scores_of(tile)

    @T.macro
    def store(out, first, number, bounds, of_scores, scored):
        """A tile of logits, `-inf` outside of ranges, and everywhere if it was not scored."""
        for t, i in T.Parallel(queries, keys):
            key = number * keys + i
            if first + t < tokens and key < num_keys:
                if scored and key >= bounds[0, t] and key < bounds[1, t]:
                    out[first + t, key] = T.cast(of_scores[t, i], made.out_dtype)
                else:
                    out[first + t, key] = T.cast(-T.infinity(T.float32), made.out_dtype)

    @T.prim_func
    def score_blocks(
        q: T.Tensor[(tokens, heads, width), element],
        q_sf: T.Tensor[q_scales, T.uint8],
        k: T.Tensor[(num_keys, width), element],
        k_sf: T.Tensor[k_scales, T.uint8 if packed else T.float32],
        weights: T.Tensor[(tokens, heads), T.float32],
        start: T.Tensor[(tokens,), T.int32],
        end: T.Tensor[(tokens,), T.int32],
        marks: T.Tensor[(tokens, shares), T.int32],
        out: T.Tensor[(tokens, num_keys), made.out_dtype],
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
            of_weights = T.alloc_fragment((tile.columns,), T.float32)
            products = T.alloc_fragment((keys, tile.columns), T.float32)
            by_head = T.reshape(products, (keys, queries, tile.padded))
            sums = T.alloc_fragment((keys, queries), T.float32)
            exponents = T.alloc_local((1,), T.uint32)
            wide = T.alloc_shared((1,), T.int32)
            least = T.alloc_var(T.int32, init=num_keys)
            most = T.alloc_var(T.int32, init=0)
            wanted = T.alloc_var(T.int32, init=1)
            first = block * queries
            if role == MARKED:
                wanted = 0
                for t in T.serial(queries):
                    if first + t < tokens:
                        wanted = T.max(wanted, marks[first + t, share])
            if wanted != 0:
                if tx == 0:
                    wide[0] = 0
                if tx < queries:
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
                for i in T.serial(tiles):
                    if share * tiles + i < begin or share * tiles + i >= last:
                        store(out, first, share * tiles + i, bounds, of_scores, False)
                for i in T.serial(stages - 1):
                    fetch(k, k_sf, begin + i, last, of_keys, raw, k_factors)
                fetch_exponents(k_sf, num_keys, begin, last, exponents)
                for number in T.serial(begin, last):
                    fetch(k, k_sf, number + stages - 1, last, of_keys, raw, k_factors)
                    arrive(number, of_keys, raw, k_factors, exponents, wide)
                    fetch_exponents(k_sf, num_keys, number + 1, last, exponents)
                    slot = number % tile.slots
                    dotted(of_keys, slot, of_queries, products, by_head, of_weights, sums)
                    scaled(sums, k_factors, number, of_scores)
                    T.sync_threads()
                    store(out, first, number, bounds, of_scores, True)
                if role == MARKING:
                    T.sync_threads()
                    if tx < queries and first + tx < tokens:
                        marks[first + tx, share] = wide[0]

    return score_blocks
