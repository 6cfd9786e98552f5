"""The scores of all keys for all queries, `-inf` outside of a query's range; and their gradients.

The gradients are those of scores at selected keys: a block per query, over tiles of its keys. What
passes relu is a sum of two bfloat16, its rounding and the rest, so that products with queries and
keys lose nothing that matters. A key is selected by many queries. Their shares of its gradient are
added as integers, in units of a power of two that the host chooses so that nothing overflows:
integers add up to the same sum in any order.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer_plan import E2M1, MARKED, MARKING, Tile
from tile_kernels.attention.list_primitives import NO_TYPED_SYNC
from tile_kernels.attention.logits.plan import Plan
from tile_kernels.attention.score_primitives import (
    landing_places,
    load_queries,
    marks_of,
    product,
    query_ranges,
    scores_of,
    shared_memory,
    stream_keys,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

BITS = {"float32": 32, "bfloat16": 16}


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    made = Plan(*static)
    loads = (8, 32, 128) if made.source == E2M1 else (32, 128)
    return loads, BITS[made.out_dtype]


@kernel(access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
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


# ---- gradients -----------------------------------------------------------------------------------

KEYS, THREADS = 64, 256  # of a tile, of a block


@kernel(access_bits=lambda *_: ((32, 64, 128), 64), pass_configs=EXPLICIT_GUARDS)
def selected_gradients(source: str, heads: int, padded: int, depth: int, fenced: bool) -> Any:
    """`grad_k` in units of `1 / scale[0]`; what is not there, and padding, has no share."""
    tokens, num_keys, chosen = T.dynamic("tokens num_keys chosen")
    scaled = source != "bfloat16"

    @T.macro
    def publish():
        """A barrier, after which the matrix units see what was written to shared memory."""
        if fenced:
            T.fence_proxy_async()
        T.sync_threads()

    @T.prim_func
    def gradients_of_query(
        q: T.Tensor[(tokens, heads, depth), source],
        k: T.Tensor[(num_keys, depth), source],
        k_sf: T.Tensor[(num_keys,), T.float32],
        weights: T.Tensor[(tokens, heads), T.float32],
        indices: T.Tensor[(tokens, chosen), T.int32],
        grad: T.Tensor[(tokens, chosen), T.float32],
        scale: T.Tensor[(1,), T.float32],
        grad_q: T.Tensor[(tokens, heads, depth), T.float32],
        grad_k: T.Tensor[(num_keys, depth), T.int64],
        grad_weights: T.Tensor[(tokens, heads), T.float32],
    ):
        with T.Kernel(tokens, threads=THREADS) as token:
            tx = T.get_thread_binding()
            of_q = T.alloc_shared((padded, depth), T.bfloat16)
            of_k = T.alloc_shared((KEYS, depth), T.bfloat16)
            passed = T.alloc_shared((KEYS, padded), T.bfloat16)
            rest = T.alloc_shared((KEYS, padded), T.bfloat16)
            ids = T.alloc_shared((KEYS,), T.int32)
            incoming = T.alloc_shared((KEYS,), T.float32)
            loaded_q = T.alloc_fragment((padded, depth), source)
            loaded_k = T.alloc_fragment((KEYS, depth), source)
            of_weights = T.alloc_fragment((padded,), T.float32)
            products = T.alloc_fragment((KEYS, padded), T.float32)
            weighted = T.alloc_fragment((KEYS, padded), T.float32)
            of_heads = T.alloc_fragment((padded,), T.float32)
            new_q = T.alloc_fragment((padded, depth), T.float32)
            new_k = T.alloc_fragment((KEYS, depth), T.float32)
            factor = T.alloc_var(T.float32, init=scale[0])
            T.clear(new_q)
            T.clear(weighted)
            for i, j in T.Parallel(padded, depth):
                # Loaded first, then cast: in one step the load would not wait for the condition.
                if i < heads:
                    loaded_q[i, j] = q[token, i, j]
                else:
                    loaded_q[i, j] = T.cast(0, source)
            for i, j in T.Parallel(padded, depth):
                of_q[i, j] = T.cast(loaded_q[i, j], T.bfloat16)
            for j in T.Parallel(padded):
                if j < heads:
                    of_weights[j] = weights[token, j]
                else:
                    of_weights[j] = T.float32(0)
            for tile in T.serial(T.ceildiv(chosen, KEYS)):
                T.sync_threads()
                if tx < KEYS:
                    ids[tx] = -1
                    incoming[tx] = T.float32(0)
                    if tile * KEYS + tx < chosen:
                        key = T.alloc_var(T.int32, init=indices[token, tile * KEYS + tx])
                        if key >= 0 and key < num_keys:
                            ids[tx] = key
                            incoming[tx] = grad[token, tile * KEYS + tx]
                            if scaled:
                                incoming[tx] = incoming[tx] * k_sf[key]
                T.sync_threads()
                for i, j in T.Parallel(KEYS, depth):
                    if ids[i] >= 0:
                        loaded_k[i, j] = k[ids[i], j]
                    else:
                        loaded_k[i, j] = T.cast(0, source)
                for i, j in T.Parallel(KEYS, depth):
                    of_k[i, j] = T.cast(loaded_k[i, j], T.bfloat16)
                publish()
                T.gemm(
                    of_k, of_q, products, transpose_B=True, clear_accum=True,
                    policy=T.GemmWarpPolicy.FullCol,
                )  # fmt: skip
                for i, j in T.Parallel(KEYS, padded):
                    weighted[i, j] = weighted[i, j] + incoming[i] * T.max(products[i, j], 0)
                for i, j in T.Parallel(KEYS, padded):
                    products[i, j] = T.if_then_else(
                        products[i, j] > 0, incoming[i] * of_weights[j], T.float32(0)
                    )
                for i, j in T.Parallel(KEYS, padded):
                    passed[i, j] = T.cast(products[i, j], T.bfloat16)
                    rest[i, j] = T.cast(
                        products[i, j] - T.cast(passed[i, j], T.float32), T.bfloat16
                    )
                publish()
                T.clear(new_k)
                for part in (passed, rest):
                    T.gemm(part, of_k, new_q, transpose_A=True, policy=T.GemmWarpPolicy.FullCol)
                    T.gemm(part, of_q, new_k, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(KEYS, depth):
                    if ids[i] >= 0:
                        T.atomic_add(grad_k[ids[i], j], T.cast(new_k[i, j] * factor, T.int64))
            T.reduce_sum(weighted, of_heads, dim=0)
            for j in T.Parallel(padded):
                if j < heads:
                    grad_weights[token, j] = of_heads[j]
            for i, j in T.Parallel(padded, depth):
                if i < heads:
                    grad_q[token, i, j] = new_q[i, j]

    return gradients_of_query
