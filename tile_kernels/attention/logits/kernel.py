"""The scores of all keys for all queries, `-inf` outside of a query's range; and their gradients.

The gradients are those of scores at selected keys: a block per query, over tiles of its keys. What
passes relu is a sum of two bfloat16, its rounding and the rest, so that products with queries and
keys lose nothing that matters. A key is selected by many queries. Their shares of its gradient are
added as integers, in units of a power of two that a first kernel chooses so that nothing overflows:
integers add up to the same sum in any order. A last kernel makes them numbers of float32.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer_plan import E2M1, MARKED, MARKING, with_tile
from tile_kernels.attention.list_primitives import NO_TYPED_SYNC
from tile_kernels.attention.logits.pipelined import pipelined_scores
from tile_kernels.attention.logits.plan import MAX_SCALE_BLOCKS, Plan
from tile_kernels.attention.score_primitives import (
    SharedTiles,
    Work,
    registers,
    score_macros,
    score_types,
    shared_memory,
)
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, is_last_block
from tile_kernels.runtime.launch import kernel

BITS = {"float32": 32, "bfloat16": 16}


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    tile, out_dtype, _ = with_tile(Plan, static)
    loads = [8] if tile.source == E2M1 else []
    if tile.pipelined and tile.heads == tile.padded:  # a thread has two weights
        loads.append(64)
    return tuple(sorted([*loads, 32, 128])), BITS[out_dtype]


@kernel(access_bits=access_bits, pass_configs={**NO_TYPED_SYNC, **EXPLICIT_GUARDS})
def score_tiles(*static: Any) -> Any:
    """A block has some queries and a share of the keys, `share_keys`, a multiple of 128."""
    tile, out_dtype, role = with_tile(Plan, static)
    if tile.pipelined:
        return pipelined_scores(tile, out_dtype, role)
    keys, queries = tile.keys, tile.queries
    types, steps = score_types(tile), score_macros(tile)
    tokens, num_keys = types.tokens, types.num_keys

    @T.macro
    def store(out, first, number, shared, scored):
        """A tile of logits, `-inf` outside of ranges, and everywhere if it was not scored."""
        for t, i in T.Parallel(queries, keys):
            key = number * keys + i
            if scored and key >= shared.bounds[0, t] and key < shared.bounds[1, t]:
                out[first + t, key] = T.cast(shared.scores[number % 2, t, i], out_dtype)
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
        iterations = T.max(block_queries // queries, 1) if role == MARKED else 1
        with types.grid(tile, iterations, share_keys) as (block, share):
            T.annotate_min_blocks_per_sm(tile.blocks)
            tx = T.get_thread_binding()
            shared = SharedTiles(*shared_memory(tile, 2))
            work = Work(*registers(tile))
            wanted = T.alloc_var(T.bool, init=T.bool(True))
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
                if role == MARKED:
                    T.sync_threads()
                    wanted = steps.marked(marks, first, tokens, share)
                if wanted:
                    steps.begin_marks(k_marks, num_keys, share, share_keys, work.wide)
                    steps.begin(
                        q, q_sf, weights, start, end, first, tokens, num_keys, share, share_keys,
                        shared, work,
                    )  # fmt: skip
                    tiles = share_keys // keys
                    begin = T.alloc_var(T.int32, init=work.between[0])
                    last = T.alloc_var(T.int32, init=work.between[1])
                    for i in T.serial(tiles):
                        if share * tiles + i < begin or share * tiles + i >= last:
                            store(out, first, share * tiles + i, shared, False)
                    steps.open_stream(k, k_sf, num_keys, begin, last, shared, work)
                    for number in T.serial(begin, last):
                        steps.arrive(number, begin, last, shared, work)
                        steps.start_product(number % tile.slots, shared, work)
                        steps.forward(k, k_sf, num_keys, number, last, shared, work)
                        if number > begin:
                            store(out, first, number - 1, shared, True)
                        steps.finish_product(shared, work)
                        steps.scaled(number, shared, work, number % 2)
                    T.sync_threads()
                    if begin < last:
                        store(out, first, last - 1, shared, True)
                    if role == MARKING:
                        if tx < queries and first + tx < tokens:
                            marks[first + tx, share] = work.wide[0]

    return score_blocks


# ---- gradients -----------------------------------------------------------------------------------

KEYS, THREADS = 64, 256  # of a tile, of a block
WARPS = THREADS // WARP
VECTOR = 8  # bfloat16 of 16 bytes
LARGEST_E4M3 = 448.0
MAGNITUDE, EXPONENT = 0x7FFFFFFF, 0x7F800000  # bits of float32


@T.macro
def magnitude(value):
    """The bits of `|value|`: as integers they have the order of the numbers, and NaN is largest."""
    return T.reinterpret(value, T.int32) & T.int32(MAGNITUDE)


@T.macro
def max_over_block(maxima, warp_maxima):
    """The three values of `maxima`, each the largest of all threads, in every thread. A barrier."""
    tx = T.get_thread_binding()
    for d in T.unroll(5):
        for i in T.unroll(3):
            maxima[i] = T.max(maxima[i], T.shfl_xor(maxima[i], T.shift_left(1, d)))
    if tx % WARP == 0:
        for i in T.unroll(3):
            warp_maxima[i, tx // WARP] = maxima[i]
    T.sync_threads()
    for i in T.unroll(3):
        for w in T.unroll(WARPS):
            maxima[i] = T.max(maxima[i], warp_maxima[i, w])
    T.sync_threads()


@T.macro
def power_of_two(exponent):
    """`2^exponent` in float32, for a whole number in -126..127."""
    return T.reinterpret((T.cast(exponent, T.int32) + 127) << 23, T.float32)


@kernel(
    access_bits=lambda source, *_: ((32, 128) if source == "bfloat16" else 32, (32, 64)),
    pass_configs=EXPLICIT_GUARDS,
)
def gradient_scale(source: str, heads: int, depth: int) -> Any:
    """The inverse of the power of two that shares of a key's gradient are counted in.

    A share is at most `|grad| |k_sf| sum of |weights| max of |q|`, each the largest there is. Each
    block has those of some tokens, the last one those of all. `sum_bits` are what a share may have.
    The integers are reset to zero.
    """
    tokens, num_keys, chosen = T.dynamic("tokens num_keys chosen")
    num_tickets = T.dynamic("num_tickets")
    scaled = source != "bfloat16"
    rows = THREADS // depth  # of zeros in a step

    @T.macro
    def clear(counted, block, blocks):
        tx = T.get_thread_binding()
        for step in T.serial(T.ceildiv(num_keys, rows * blocks)):
            key = (step * blocks + block) * rows + tx // depth
            if key < num_keys:
                counted[key, tx % depth] = T.int64(0)

    @T.macro
    def token_maxima(q, k_sf, weights, indices, grad, token, maxima):
        tx = T.get_thread_binding()
        q_regs = T.alloc_local((VECTOR,), T.bfloat16)
        for step in T.serial(T.ceildiv(chosen, THREADS)):
            if step * THREADS + tx < chosen:
                key = T.alloc_var(T.int32, init=indices[token, step * THREADS + tx])
                if key >= 0 and key < num_keys:
                    value = T.alloc_var(T.float32, init=grad[token, step * THREADS + tx])
                    if scaled:
                        value = T.ieee_mul(value, k_sf[key])
                    maxima[0] = T.max(maxima[0], magnitude(value))
        if tx < WARP:
            total = T.alloc_var(T.float32, init=T.float32(0))
            for step in T.unroll(-(-heads // WARP)):
                if step * WARP + tx < heads:
                    total = T.ieee_add(total, T.abs(weights[token, step * WARP + tx]))
            for d in T.unroll(5):
                total = T.ieee_add(total, T.shfl_xor(total, T.shift_left(1, d)))
            maxima[1] = T.max(maxima[1], magnitude(total))
        if not scaled:
            for step in T.unroll(-(-heads * depth // (VECTOR * THREADS))):
                first = (step * THREADS + tx) * VECTOR
                if first < heads * depth:
                    for v in T.vectorized(VECTOR):
                        q_regs[v] = q[token, first // depth, first % depth + v]
                    for v in T.unroll(VECTOR):
                        maxima[2] = T.max(maxima[2], magnitude(T.cast(q_regs[v], T.float32)))

    @T.prim_func
    def scale_of_gradients(
        q: T.Tensor[(tokens, heads, depth), source],
        k_sf: T.Tensor[(num_keys,), T.float32],
        weights: T.Tensor[(tokens, heads), T.float32],
        indices: T.Tensor[(tokens, chosen), T.int32],
        grad: T.Tensor[(tokens, chosen), T.float32],
        counted: T.Tensor[(num_keys, depth), T.int64],
        partials: T.Tensor[(MAX_SCALE_BLOCKS, 3), T.int32],
        scale: T.Tensor[(1,), T.float32],
        tickets: T.Tensor[(num_tickets,), T.int32],
        ticket: T.int32,
        sum_bits: T.int32,
    ):
        with T.Kernel(T.min(tokens, MAX_SCALE_BLOCKS), threads=THREADS) as block:
            tx = T.get_thread_binding()
            blocks = T.min(tokens, MAX_SCALE_BLOCKS)
            maxima = T.alloc_local((3,), T.int32)
            warp_maxima = T.alloc_shared((3, WARPS), T.int32)
            for i in T.unroll(3):
                maxima[i] = 0
            clear(counted, block, blocks)
            for iteration in T.serial(T.ceildiv(tokens, blocks)):
                if iteration * blocks + block < tokens:
                    token_maxima(
                        q, k_sf, weights, indices, grad, iteration * blocks + block, maxima
                    )
            max_over_block(maxima, warp_maxima)
            if tx == 0:
                for i in T.unroll(3):
                    partials[block, i] = maxima[i]
            if is_last_block(tickets, ticket, blocks):
                for step in T.serial(T.ceildiv(blocks, THREADS)):
                    if step * THREADS + tx < blocks:
                        for i in T.unroll(3):
                            maxima[i] = T.max(maxima[i], partials[step * THREADS + tx, i])
                max_over_block(maxima, warp_maxima)
                if tx == 0:
                    largest = T.alloc_var(T.float32, init=T.reinterpret(maxima[0], T.float32))
                    largest = T.ieee_mul(largest, T.reinterpret(maxima[1], T.float32))
                    if scaled:
                        largest = T.ieee_mul(largest, T.float32(LARGEST_E4M3))
                    else:
                        largest = T.ieee_mul(largest, T.reinterpret(maxima[2], T.float32))
                    exponent = T.alloc_var(T.float32, init=T.ceil(T.log2(largest)))
                    exponent = T.cast(sum_bits, T.float32) - exponent
                    exponent = T.max(T.min(exponent, T.float32(126)), T.float32(-126))
                    scale[0] = power_of_two(exponent)
                    if magnitude(largest) >= EXPONENT:  # infinite or NaN
                        scale[0] = T.reinterpret(T.int32(MAGNITUDE), T.float32)

    return scale_of_gradients


@kernel(access_bits=lambda *_: ((32, 128), 64), pass_configs=EXPLICIT_GUARDS)
def counted_gradient(depth: int) -> Any:
    """`counted / scale[0]`, rounded to float32."""
    num_keys = T.dynamic("num_keys")
    lanes = depth // 2
    rows = THREADS // lanes

    @T.prim_func
    def gradient_of_keys(
        counted: T.Tensor[(num_keys, depth), T.int64],
        scale: T.Tensor[(1,), T.float32],
        grad_k: T.Tensor[(num_keys, depth), T.float32],
    ):
        with T.Kernel(T.ceildiv(num_keys, rows), threads=THREADS) as block:
            tx = T.get_thread_binding()
            key = block * rows + tx // lanes
            first = tx % lanes * 2
            loaded = T.alloc_local((2,), T.int64)
            found = T.alloc_local((2,), T.float32)
            if key < num_keys:
                unit = T.alloc_var(T.float64, init=T.float64(1) / T.cast(scale[0], T.float64))
                for v in T.vectorized(2):
                    loaded[v] = counted[key, first + v]
                for v in T.unroll(2):
                    found[v] = T.cast(T.cast(loaded[v], T.float64) * unit, T.float32)
                for v in T.vectorized(2):
                    grad_k[key, first + v] = found[v]

    return gradient_of_keys


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
            q_tile = T.alloc_shared((padded, depth), T.bfloat16)
            k_tile = T.alloc_shared((KEYS, depth), T.bfloat16)
            passed = T.alloc_shared((KEYS, padded), T.bfloat16)
            rest = T.alloc_shared((KEYS, padded), T.bfloat16)
            ids = T.alloc_shared((KEYS,), T.int32)
            incoming = T.alloc_shared((KEYS,), T.float32)
            loaded_q = T.alloc_fragment((padded, depth), source)
            loaded_k = T.alloc_fragment((KEYS, depth), source)
            weight_regs = T.alloc_fragment((padded,), T.float32)
            products = T.alloc_fragment((KEYS, padded), T.float32)
            weighted = T.alloc_fragment((KEYS, padded), T.float32)
            head_sums = T.alloc_fragment((padded,), T.float32)
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
                q_tile[i, j] = T.cast(loaded_q[i, j], T.bfloat16)
            for j in T.Parallel(padded):
                if j < heads:
                    weight_regs[j] = weights[token, j]
                else:
                    weight_regs[j] = T.float32(0)
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
                    k_tile[i, j] = T.cast(loaded_k[i, j], T.bfloat16)
                publish()
                T.gemm(
                    k_tile, q_tile, products, transpose_B=True, clear_accum=True,
                    policy=T.GemmWarpPolicy.FullCol,
                )  # fmt: skip
                for i, j in T.Parallel(KEYS, padded):
                    weighted[i, j] = weighted[i, j] + incoming[i] * T.max(products[i, j], 0)
                for i, j in T.Parallel(KEYS, padded):
                    products[i, j] = T.if_then_else(
                        products[i, j] > 0, incoming[i] * weight_regs[j], T.float32(0)
                    )
                for i, j in T.Parallel(KEYS, padded):
                    passed[i, j] = T.cast(products[i, j], T.bfloat16)
                    rest[i, j] = T.cast(
                        products[i, j] - T.cast(passed[i, j], T.float32), T.bfloat16
                    )
                publish()
                T.clear(new_k)
                for part in (passed, rest):
                    T.gemm(part, k_tile, new_q, transpose_A=True, policy=T.GemmWarpPolicy.FullCol)
                    T.gemm(part, q_tile, new_k, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(KEYS, depth):
                    if ids[i] >= 0:
                        T.atomic_add(grad_k[ids[i], j], T.cast(new_k[i, j] * factor, T.int64))
            T.reduce_sum(weighted, head_sums, dim=0)
            for j in T.Parallel(padded):
                if j < heads:
                    grad_weights[token, j] = head_sums[j]
            for i, j in T.Parallel(padded, depth):
                if i < heads:
                    grad_q[token, i, j] = new_q[i, j]

    return gradients_of_query
