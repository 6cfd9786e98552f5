"""The scores of all keys for all queries, `-inf` outside of a query's range; and their gradients.

The gradients are those of scores at selected keys: a block per query, over tiles of its keys. What
passes relu is a sum of two bfloat16, its rounding and the rest, so that products with queries and
keys lose nothing that matters. A key is selected by many queries. Their shares of its gradient are
added as integers, in units of a power of two that the host chooses so that nothing overflows:
integers add up to the same sum in any order.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer_plan import E2M1, MARKED, MARKING, with_tile
from tile_kernels.attention.list_primitives import NO_TYPED_SYNC
from tile_kernels.attention.logits.plan import Plan
from tile_kernels.attention.score_primitives import (
    Held,
    Work,
    registers,
    score_macros,
    score_types,
    shared_memory,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

BITS = {"float32": 32, "bfloat16": 16}


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    tile, out_dtype, _ = with_tile(Plan, static)
    return (8, 32, 128) if tile.source == E2M1 else (32, 128), BITS[out_dtype]


@kernel(access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def score_tiles(*static: Any) -> Any:
    """A block has some queries and a share of the keys, `share_keys`, a multiple of 128."""
    tile, out_dtype, role = with_tile(Plan, static)
    keys, queries = tile.keys, tile.queries
    types, steps = score_types(tile), score_macros(tile)
    tokens, num_keys = types.tokens, types.num_keys

    @T.macro
    def store(out, first, number, held, scored):
        """A tile of logits, `-inf` outside of ranges, and everywhere if it was not scored."""
        for t, i in T.Parallel(queries, keys):
            key = number * keys + i
            if scored and key >= held.bounds[0, t] and key < held.bounds[1, t]:
                out[first + t, key] = T.cast(held.scores[number % 2, t, i], out_dtype)
            elif first + t < tokens and key < num_keys:
                out[first + t, key] = T.cast(-T.infinity(T.float32), out_dtype)

    @T.prim_func
    def score_blocks(
        q: types.q, q_sf: types.q_sf, k: types.k, k_sf: types.k_sf, k_marks: types.k_marks,
        weights: types.weights, start: types.start, end: types.end, marks: types.marks,
        out: T.Tensor[(tokens, num_keys), out_dtype],
        share_keys: T.int32,
        block_queries: T.int32,
    ):  # fmt: skip
        turns = T.max(block_queries // queries, 1) if role == MARKED else 1
        with types.grid(tile, turns, share_keys) as (block, share):
            T.annotate_min_blocks_per_sm(tile.blocks)
            tx = T.get_thread_binding()
            held = Held(*shared_memory(tile, 2))
            work = Work(*registers(tile))
            wanted = T.alloc_var(T.bool, init=T.bool(True))
            some = T.alloc_var(T.int32, init=turns)
            if role == MARKED:
                if not steps.some_marked(
                    marks, block * turns * queries, turns * queries, tokens, share, work.wide
                ):
                    some = 0
            for turn in T.serial(some if role == MARKED else 1):
                first = (block * turns + turn) * queries
                if role == MARKED:
                    T.sync_threads()
                    wanted = steps.marked(marks, first, tokens, share)
                if wanted:
                    steps.begin_marks(k_marks, num_keys, share, share_keys, work.wide)
                    steps.begin(
                        q, q_sf, weights, start, end, first, tokens, num_keys, share, share_keys,
                        held, work,
                    )  # fmt: skip
                    tiles = share_keys // keys
                    begin = T.alloc_var(T.int32, init=work.between[0])
                    last = T.alloc_var(T.int32, init=work.between[1])
                    for i in T.serial(tiles):
                        if share * tiles + i < begin or share * tiles + i >= last:
                            store(out, first, share * tiles + i, held, False)
                    steps.open_stream(k, k_sf, num_keys, begin, last, held, work)
                    for number in T.serial(begin, last):
                        steps.arrive(number, begin, last, held, work)
                        steps.start_product(number % tile.slots, held, work)
                        steps.forward(k, k_sf, num_keys, number, last, held, work)
                        if number > begin:
                            store(out, first, number - 1, held, True)
                        steps.finish_product(held, work)
                        steps.scaled(number, held, work, number % 2)
                    T.sync_threads()
                    if begin < last:
                        store(out, first, last - 1, held, True)
                    if role == MARKING:
                        if tx < queries and first + tx < tokens:
                            marks[first + tx, share] = work.wide[0]

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
