"""The scores of all keys for all queries, `-inf` outside of a query's range."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.kernels.indexer_list import NO_TYPED_SYNC
from tile_kernels.attention.kernels.indexer_scores import (
    E2M1,
    Tile,
    landing_places,
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
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

MOST_QUERIES = 16
BITS = {"float32": 32, "bfloat16": 16}
ALL, MARKING, MARKED = "all", "marking", "marked"


class Plan(NamedTuple):
    """A tile's numbers, then the dtype of logits, and which blocks: `all`, which are right; all,
    `marking` those that are not; those that are `marked`."""

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
    out_dtype: str
    role: str


def plan(
    source: str, of_keys: str, heads: int, depth: int, out_dtype: str, role: str, device: Device
) -> Plan:
    tile, _ = tile_plan(source, of_keys, role == MARKED, heads, depth, MOST_QUERIES, device)
    return Plan(*tile, out_dtype, role)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    made = Plan(*static)
    loads = (8, 32, 128) if made.source == E2M1 else (32, 128)
    return loads, BITS[made.out_dtype]


@kernel(plan=plan, access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def score_tiles(*static: Any) -> Any:
    """A block has some queries and a share of the keys, `share_keys`, a multiple of 128."""
    made = Plan(*static)
    tile, role = Tile(*static[: len(Tile._fields)]), made.role
    heads, keys, queries = tile.heads, tile.keys, tile.queries
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

    @T.macro
    def store(out, first, number, bounds, of_scores, scored):
        """A tile of logits, `-inf` outside of ranges, and everywhere if it was not scored."""
        for t, i in T.Parallel(queries, keys):
            key = number * keys + i
            if scored and key >= bounds[0, t] and key < bounds[1, t]:
                out[first + t, key] = T.cast(of_scores[number % 2, t, i], made.out_dtype)
            elif first + t < tokens and key < num_keys:
                out[first + t, key] = T.cast(-T.infinity(T.float32), made.out_dtype)

    @T.prim_func
    def score_blocks(
        q: T.Tensor[(tokens, heads, width), element],
        q_sf: T.Tensor[q_scales, T.uint8],
        k: T.Tensor[(num_keys, k_width), k_element],
        k_sf: T.Tensor[k_scales, T.uint8 if tile.packed else T.float32],
        k_marks: T.Tensor[(marked_tiles, 1), T.int32],
        weights: T.Tensor[(tokens, heads), T.float32],
        start: T.Tensor[(tokens,), T.int32],
        end: T.Tensor[(tokens,), T.int32],
        marks: T.Tensor[(tokens, shares), T.int32],
        out: T.Tensor[(tokens, num_keys), made.out_dtype],
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
            landing = landing_places(tile)
            wide = T.alloc_shared((1,), T.int32)
            products = T.alloc_fragment((keys, tile.columns), T.float32)
            by_head = T.reshape(products, (keys, queries, tile.padded))
            sums = T.alloc_fragment((keys, queries), T.float32)
            words = T.alloc_local((4 * tile.rounds,), T.uint32)
            exponents = T.alloc_local((tile.rounds,), T.int32)
            between = T.alloc_local((2,), T.int32)
            wanted = T.alloc_var(T.bool, init=T.bool(True))
            some = T.alloc_var(T.int32, init=turns)
            if role == MARKED:
                if not some_marked(
                    marks, block * turns * queries, turns * queries, tokens, share, wide
                ):
                    some = 0
            for turn in T.serial(some if role == MARKED else 1):
                first = (block * turns + turn) * queries
                if role == MARKED:
                    T.sync_threads()
                    wanted = marked(marks, first, tokens, share)
                if wanted:
                    begin_marks(k_marks, num_keys, share, share_keys, wide)
                    load_ranges(start, end, first, tokens, num_keys, bounds)
                    T.sync_threads()
                    load(q, q_sf, weights, first, tokens, of_queries, q_factors, of_weights, wide)
                    tiles = share_keys // keys
                    span(bounds, num_keys, share, tiles, between)
                    begin = T.alloc_var(T.int32, init=between[0])
                    last = T.alloc_var(T.int32, init=between[1])
                    for i in T.serial(tiles):
                        if share * tiles + i < begin or share * tiles + i >= last:
                            store(out, first, share * tiles + i, bounds, of_scores, False)
                    open_stream(
                        k, k_sf, num_keys, begin, last, of_keys, raw, k_factors, landing, words,
                        exponents, wide,
                    )  # fmt: skip
                    for number in T.serial(begin, last):
                        arrive(
                            number, begin, last, of_keys, raw, k_factors, landing, words, exponents,
                            wide,
                        )  # fmt: skip
                        start_product(of_keys, number % tile.slots, of_queries, products)
                        forward(
                            k, k_sf, num_keys, number, last, of_keys, raw, k_factors, landing,
                            words, exponents, wide,
                        )  # fmt: skip
                        if number > begin:
                            store(out, first, number - 1, bounds, of_scores, True)
                        finish_product(products, by_head, of_weights, sums)
                        scaled(sums, k_factors, number, of_scores, number % 2)
                    T.sync_threads()
                    if begin < last:
                        store(out, first, last - 1, bounds, of_scores, True)
                    if role == MARKING:
                        if tx < queries and first + tx < tokens:
                            marks[first + tx, share] = wide[0]

    return score_blocks
