"""The scores of keys for queries, on tensor cores: a tile of keys for all heads of some queries.

    score[t, s] = k_sf[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s])

A block holds the rows (query, head) of its queries and streams over tiles of keys. Keys are the
rows of the product and (query, head) its columns, so that a thread and its three neighbours hold
all heads of a key: they are weighted and summed in registers. While the matrix units multiply a
tile, threads expand the next one and put away the scores of the one before.

The matrix units multiply e4m3 or bfloat16. Packed e2m1 is expanded as it is copied to shared
memory: to e4m3 where all groups of each row are within `2**11` of its largest one, the row's own
power of two apart, which is exact; to bfloat16 otherwise. A launch in e4m3 marks the blocks that it
cannot do exactly, and a second one in bfloat16 does those alone. For many queries keys are expanded
to e4m3 in memory first (see `expand_keys`), once instead of for each block.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.indexer_plan import BF16, E2M1, E4M3, GROUP, KEYS, Tile
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.kernels.e2m1 import DOWN, HIGH, HIGH_STEP, LOW, LOW_STEP, UP, bytes_of
from tile_kernels.runtime.launch import kernel

# ---- kernels that score -------------------------------------------------------------------------


class ScoreTypes(NamedTuple):
    """Types of the parameters of kernels that score, and the sizes that a launch has."""

    tokens: Any
    num_keys: Any
    shares: Any
    q: Any
    q_sf: Any
    k: Any
    k_sf: Any
    k_marks: Any
    weights: Any
    start: Any
    end: Any
    marks: Any

    def grid(self, tile: Tile, iterations: Any, share_keys: Any) -> Any:
        """The blocks of a launch, by queries (`iterations` tiles for each) and by share of keys."""
        return T.Kernel(
            T.ceildiv(self.tokens, iterations * tile.queries),
            T.ceildiv(self.num_keys, share_keys),
            threads=tile.all_threads,
        )


def score_types(tile: Tile) -> ScoreTypes:
    """The types for queries and keys in the formats of a tile."""
    tokens, num_keys, shares, marked_tiles = T.dynamic("tokens num_keys shares marked_tiles")
    (width, element), (k_width, k_element) = tile.row(tile.source), tile.row(tile.key_format)
    k_scales = (num_keys, tile.groups) if tile.packed else (num_keys,)
    return ScoreTypes(
        tokens, num_keys, shares,
        q=T.Tensor[(tokens, tile.heads, width), element],
        q_sf=T.Tensor[(tokens, tile.heads, tile.groups), T.uint8],
        k=T.Tensor[(num_keys, k_width), k_element],
        k_sf=T.Tensor[k_scales, T.uint8 if tile.packed else T.float32],
        k_marks=T.Tensor[(marked_tiles, 1), T.int32],
        weights=T.Tensor[(tokens, tile.heads), T.float32],
        start=T.Tensor[(tokens,), T.int32],
        end=T.Tensor[(tokens,), T.int32],
        marks=T.Tensor[(tokens, shares), T.int32],
    )  # fmt: skip


class SharedTiles(NamedTuple):
    """What a block holds of queries and keys in shared memory, and the scores of some tiles.

    Factors of queries are where scores will be: they are done with before. `landing` is a barrier
    for each tile of keys that is in flight, if they are copied whole.
    """

    queries: Any
    keys: Any
    raw: Any  # keys before they are expanded
    q_factors: Any
    weights: Any
    k_factors: Any
    bounds: Any  # ranges
    scores: Any
    landing: Any


@T.macro
def shared_memory(tile, slots):
    """A `SharedTiles`, with room for the scores of `slots` tiles."""
    score_tiles = T.alloc_shared((slots, tile.queries, tile.keys), T.float32)
    query_tile = T.alloc_shared((1, tile.columns, tile.depth), tile.unit)
    key_tile = T.alloc_shared((tile.slots, tile.keys, tile.depth), tile.unit)
    raw = T.alloc_shared(tile.raw, tile.row(tile.key_format)[1])
    q_factors = T.view(score_tiles, (1, slots * tile.queries * tile.keys))
    weight_tile = T.alloc_shared((tile.columns,), T.float32)
    k_factors = T.alloc_shared((tile.factor_slots, tile.keys), T.float32)
    bounds = T.alloc_shared((2, tile.queries), T.int32)
    landing = T.alloc_barrier([1] * tile.stages) if tile.bulk else None
    return (
        query_tile,
        key_tile,
        raw,
        q_factors,
        weight_tile,
        k_factors,
        bounds,
        score_tiles,
        landing,
    )


class Work(NamedTuple):
    """What threads compute with: `wide` is a flag in shared memory, the rest is in registers."""

    wide: Any
    products: Any
    by_head: Any  # the same, by query and head
    sums: Any
    words: Any
    exponents: Any
    between: Any  # the first tile, and the one after the last


@T.macro
def registers(tile):
    """A `Work`."""
    wide = T.alloc_shared((1,), T.int32)
    products = T.alloc_fragment((tile.keys, tile.columns), T.float32)
    by_head = T.reshape(products, (tile.keys, tile.queries, tile.padded))
    sums = T.alloc_fragment((tile.keys, tile.queries), T.float32)
    words = T.alloc_local((4 * tile.rounds,), T.uint32)
    exponents = T.alloc_local((tile.rounds,), T.int32)
    between = T.alloc_local((2,), T.int32)
    return wide, products, by_head, sums, words, exponents, between


class ScoreMacros(NamedTuple):
    """The steps of a block; see the functions that make them."""

    begin: Any
    any_marked: Any
    marked: Any
    begin_marks: Any
    open_stream: Any
    arrive: Any
    forward: Any
    start_product: Any
    finish_product: Any
    scaled: Any


def score_macros(tile: Tile) -> ScoreMacros:
    """The steps for a tile."""
    return ScoreMacros(begin_block(tile), *marks_of(tile), *stream_keys(tile), *product(tile))


def begin_block(tile: Tile) -> Any:
    """A macro: queries and their ranges to shared memory; which tiles of the share have keys."""
    load = load_queries(tile)
    load_ranges, span = query_ranges(tile)

    @T.macro
    def begin(
        q, q_sf, weights, start, end, first, tokens, num_keys, share, share_keys, shared, work
    ):
        load_ranges(start, end, first, tokens, num_keys, shared.bounds)
        T.sync_threads()
        load(
            q,
            q_sf,
            weights,
            first,
            tokens,
            shared.queries,
            shared.q_factors,
            shared.weights,
            work.wide,
        )
        span(shared.bounds, num_keys, share, share_keys // tile.keys, work.between)

    return begin


# ---- products -----------------------------------------------------------------------------------


def published(tile: Tile) -> Any:
    """A macro: a barrier of the threads that multiply, after which the matrix units see what was
    written to shared memory."""

    @T.macro
    def publish():
        if tile.fenced:
            T.fence_proxy_async()
        if tile.pipelined:
            T.sync_threads(1, tile.threads)
        else:
            T.sync_threads()

    return publish


def product(tile: Tile) -> Any:
    """Macros: `start` multiplies the keys of a slot with all columns; `finish` weights and adds
    heads; `scaled` writes the sums of a tile, with the factor of each key, to a slot of the scores.

    With e4m3 the weights are half of what they are (see `load_queries`).
    On Hopper the matrix units are at work from one to the other; elsewhere `start` waits for them.
    """
    num_products = tile.keys * tile.columns // tile.threads  # of a thread
    gemm = T.wgmma_gemm if tile.fenced else T.gemm

    @T.macro
    def start(slot, shared, work):
        gemm(
            shared.keys[slot, :, :], shared.queries[0, :, :], work.products,
            transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow,
        )  # fmt: skip

    @T.macro
    def weigh(products, weights):
        if tile.fenced:
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(products, num_regs=num_products)
        for i, j in T.Parallel(tile.keys, tile.columns):
            if tile.unit == E4M3:
                # Twice relu, by a unit that has nothing else to do; finite here, and NaN stays.
                products[i, j] = (products[i, j] + T.abs(products[i, j])) * weights[j]
            else:
                # relu as the larger of two integers: NaN, which is positive here, stays.
                positive = T.max(T.reinterpret(products[i, j], T.int32), 0)
                products[i, j] = T.reinterpret(positive, T.float32) * weights[j]

    @T.macro
    def finish(shared, work):
        weigh(work.products, shared.weights)
        T.reduce_sum(work.by_head, work.sums, dim=2, batch=2 * tile.queries)

    @T.macro
    def scaled(number, shared, work, slot):
        k_slot = number % tile.factor_slots
        for i, t in T.Parallel(tile.keys, tile.queries):
            if tile.key_format == BF16:
                shared.scores[slot, t, i] = work.sums[i, t]
            else:
                shared.scores[slot, t, i] = work.sums[i, t] * shared.k_factors[k_slot, i]

    return start, finish, scaled


# ---- ranges -------------------------------------------------------------------------------------


def query_ranges(tile: Tile) -> Any:
    """Macros: `load` the ranges of a block's queries to shared memory, cut to the keys that there
    are; `span`, the tiles of the block's share that some query has keys in, from one to another."""

    @T.macro
    def load(start, end, first, tokens, num_keys, bounds):
        tx = T.get_thread_binding()
        if tx < tile.queries:
            bounds[0, tx] = 0
            bounds[1, tx] = 0
            if first + tx < tokens:
                bounds[0, tx] = T.max(start[first + tx], 0)
                bounds[1, tx] = T.min(end[first + tx], num_keys)

    @T.macro
    def span(bounds, num_keys, share, tiles, between):
        smallest = T.alloc_var(T.int32, init=num_keys)
        largest = T.alloc_var(T.int32, init=0)
        for t in T.serial(tile.queries):
            if bounds[0, t] < bounds[1, t]:
                smallest = T.min(smallest, bounds[0, t])
                largest = T.max(largest, bounds[1, t])
        between[0] = T.max(share * tiles, smallest // tile.keys)
        between[1] = T.min((share + 1) * tiles, T.ceildiv(largest, tile.keys))

    return load, span


def marks_of(tile: Tile) -> Any:
    """Macros about what is not done exactly: whether queries of a block are `marked` for its share
    of the keys, and whether `any_set` of many are, through shared `flag`; `begin` a block's own
    mark, with those that its keys have by tiles of 128, if they were expanded before."""

    @T.macro
    def any_set(marks, first, count, tokens, share, flag):
        tx = T.get_thread_binding()
        if tx == 0:
            flag[0] = 0
        T.sync_threads()
        for i in T.serial(T.ceildiv(count, tile.threads)):
            if i * tile.threads + tx < count and first + i * tile.threads + tx < tokens:
                if marks[first + i * tile.threads + tx, share] != 0:
                    flag[0] = 1
        T.sync_threads()
        return flag[0] != 0

    @T.macro
    def marked(marks, first, tokens, share):
        found = T.alloc_var(T.int32, init=0)
        for t in T.serial(tile.queries):
            if first + t < tokens:
                found = T.max(found, marks[first + t, share])
        return found != 0

    @T.macro
    def begin(k_marks, num_keys, share, share_keys, wide):
        if tile.source == E2M1 and not tile.packed:
            count = share_keys // KEYS
            any_set(k_marks, share * count, count, T.ceildiv(num_keys, KEYS), 0, wide)
        elif tile.packed and T.get_thread_binding() == 0:
            wide[0] = 0

    return any_set, marked, begin


# ---- packed e2m1 --------------------------------------------------------------------------------


def expansion(unit: str, groups: int) -> Any:
    """A macro: the 32 codes of a group, `words` from `at` on, into a row of `target[slot]`, and the
    row's own factor.

    The groups of a row are in neighbouring lanes; all lanes come, those of no row with codes 0.
    `wide[0]`, shared, becomes 1 where e4m3 cannot hold all groups of the row.
    """

    @T.macro
    def to_e4m3(words, at, exponent, target, slot, row, rows, group, factors, factor_slot, wide):
        data = T.alloc_local((16,), T.float8_e4m3fn)
        octets = T.view(data, (4,), T.uint32)
        largest = T.alloc_var(T.int32, init=0)
        shift = T.alloc_var(T.int32, init=0)
        low = T.alloc_var(T.uint32, init=T.uint32(0))
        high = T.alloc_var(T.uint32, init=T.uint32(0))
        codes = words[at] | words[at + 1] | words[at + 2] | words[at + 3]
        any_set = (codes & T.uint32(0x77777777)) != T.uint32(0)
        if any_set and exponent < 255:
            largest = exponent
        for d in T.unroll((groups - 1).bit_length()):
            largest = T.max(largest, T.shfl_xor(largest, T.shift_left(1, d)))
        if exponent == 255:
            low = T.uint32(0x7F7F7F7F)
            high = T.uint32(0x7F7F7F7F)
        elif any_set and exponent > 0:
            shift = exponent - largest + UP
            if shift < DOWN:
                wide[0] = 1
                shift = DOWN
            low = T.uint32(LOW) + T.cast(shift, T.uint32) * T.uint32(LOW_STEP)
            high = T.uint32(HIGH) + T.cast(shift, T.uint32) * T.uint32(HIGH_STEP)
        for c in T.unroll(GROUP // 16):
            for half in T.unroll(2):
                bytes_of(words[at + c * 2 + half], low, high, octets, half * 2)
            if row < rows:
                for e in T.vectorized(16):
                    target[slot, row, group * GROUP + c * 16 + e] = data[e]
        if row < rows and group == 0:
            scale = T.reinterpret(T.cast(largest, T.uint32) << T.uint32(23), T.float32)
            factors[factor_slot, row] = scale * T.float32(2.0**-UP)

    @T.macro
    def to_bfloat16(
        words, at, exponent, target, slot, row, rows, group, factors, factor_slot, wide
    ):
        codes = T.alloc_local((8,), T.float8_e4m3fn)
        octets = T.view(codes, (2,), T.uint32)
        data = T.alloc_local((8,), T.bfloat16)
        scale = T.alloc_var(T.float32)
        scale = T.reinterpret(T.cast(exponent, T.uint32) << T.uint32(23), T.float32)
        if exponent == 255:
            scale = T.reinterpret(T.uint32(0x7FFFFFFF), T.float32)
        for c in T.unroll(GROUP // 8):
            bytes_of(words[at + c], T.uint32(LOW), T.uint32(HIGH), octets, 0)
            for e in T.unroll(8):
                data[e] = T.cast(T.cast(codes[e], T.float32) * scale, T.bfloat16)
            if row < rows:
                for e in T.vectorized(8):
                    target[slot, row, group * GROUP + c * 8 + e] = data[e]
        if row < rows and group == 0:
            factors[factor_slot, row] = T.float32(1)

    return to_e4m3 if unit == E4M3 else to_bfloat16


# ---- queries ------------------------------------------------------------------------------------


def load_queries(tile: Tile) -> Any:
    """A macro: rows (query, head) of the block into `query_tile`, and their weights, or half of
    them (see `product`).

    Heads and queries beyond the last are zero. A barrier must come before weights are read.
    """
    expand = expansion(tile.unit, tile.groups)
    publish = published(tile)
    threads, groups = tile.threads, tile.groups
    relu_factor = 0.5 if tile.unit == E4M3 else 1.0

    def factor_of(factors: Any, column: Any) -> Any:
        own = factors[0, column] if tile.source == E2M1 else T.float32(1)
        return own * T.float32(relu_factor)

    @T.macro
    def load(q, q_sf, weights, first, tokens, query_tile, factors, weight_tile, wide):
        if tile.source == E2M1:
            words = T.alloc_local((4,), T.uint32)
            exponent = T.alloc_var(T.int32)
            for c in T.unroll(-(-tile.columns * groups // threads)):
                row = (c * threads + T.get_thread_binding()) // groups
                group = T.get_thread_binding() % groups
                token = first + row // tile.padded
                head = row % tile.padded
                for e in T.unroll(4):
                    words[e] = T.uint32(0)
                exponent = 0
                if row < tile.columns and token < tokens and head < tile.heads:
                    for e in T.vectorized(4):
                        words[e] = q[token, head, group * 4 + e]
                    exponent = T.cast(q_sf[token, head, group], T.int32)
                expand(
                    words, 0, exponent, query_tile, 0, row, tile.columns, group, factors, 0, wide
                )
        elif tile.source != tile.unit:
            # Loaded first, then cast: in one step the load would not wait for the condition.
            loaded = T.alloc_fragment((tile.columns, tile.depth), tile.source)
            for i, j in T.Parallel(tile.columns, tile.depth):
                if first + i // tile.padded < tokens and i % tile.padded < tile.heads:
                    loaded[i, j] = q[first + i // tile.padded, i % tile.padded, j]
                else:
                    loaded[i, j] = T.cast(0, tile.source)
            for i, j in T.Parallel(tile.columns, tile.depth):
                query_tile[0, i, j] = T.cast(loaded[i, j], tile.unit)
        else:
            for i, j in T.Parallel(tile.columns, tile.depth):
                if first + i // tile.padded < tokens and i % tile.padded < tile.heads:
                    query_tile[0, i, j] = q[first + i // tile.padded, i % tile.padded, j]
                else:
                    query_tile[0, i, j] = T.cast(0, tile.unit)
        publish()
        for j in T.Parallel(tile.columns):
            weight_tile[j] = T.float32(0)
            if first + j // tile.padded < tokens and j % tile.padded < tile.heads:
                weight_tile[j] = weights[first + j // tile.padded, j % tile.padded] * factor_of(
                    factors, j
                )

    return load


# ---- keys ---------------------------------------------------------------------------------------


def stream_keys(tile: Tile) -> Any:
    """Macros: `open_stream` of the tiles from `begin` to `last`; `arrive`, after which the tile
    `number` can be multiplied; `forward`, while it is: fetches others and expands the next one.

    Tiles come by copies that go on behind, `stages` of them in a ring, or in packed form a tile
    ahead in registers. Copied whole, they land at a barrier each, and a stream is opened once.
    """
    expand = expansion(tile.unit, tile.groups)
    publish = published(tile)
    threads, groups = tile.threads, tile.groups
    copies = 2 if tile.key_format == E4M3 else 1
    reach = 2 if tile.packed else tile.stages  # tiles that are held, the one in use too

    @T.macro
    def fetch_packed(k, k_sf, num_keys, number, last, words, exponents):
        """A thread's groups of a tile, and their exponents."""
        for c in T.unroll(tile.rounds):
            exponents[c] = 0
        for e in T.unroll(4 * tile.rounds):
            words[e] = T.uint32(0)
        if number < last:
            for c in T.unroll(tile.rounds):
                row = (c * threads + T.get_thread_binding()) // groups
                group = T.get_thread_binding() % groups
                if row < tile.keys and number * tile.keys + row < num_keys:
                    for e in T.vectorized(4):
                        words[c * 4 + e] = k[number * tile.keys + row, group * 4 + e]
                    exponents[c] = T.cast(k_sf[number * tile.keys + row, group], T.int32)

    @T.macro
    def fetch_copies(k, k_sf, number, last, key_tile, raw, factors):
        if number < last:
            row = number * tile.keys
            slot = number % tile.stages
            if tile.expanded:
                T.async_copy(k[row : row + tile.keys, 0 : tile.depth], raw[slot, :, :])
            else:
                T.async_copy(k[row : row + tile.keys, 0 : tile.depth], key_tile[slot, :, :])
            if tile.key_format == E4M3:
                T.async_copy(k_sf[row : row + tile.keys], factors[number % tile.factor_slots, :])
        else:
            for _ in T.unroll(copies):
                T.ptx_commit_group()

    @T.macro
    def fetch_whole(k, k_sf, number, last, key_tile, factors, landing):
        if number < last:
            row = number * tile.keys
            slot = number % tile.stages
            T.tma_copy(
                k[row : row + tile.keys, 0 : tile.depth],
                key_tile[slot, :, :],
                barrier=landing[slot],
            )
            if tile.key_format == E4M3:
                T.tma_copy(k_sf[row : row + tile.keys], factors[slot, :], barrier=landing[slot])
            if T.get_thread_binding() == 0:
                T.barrier_arrive(landing[slot])

    @T.macro
    def fetch(k, k_sf, num_keys, number, last, shared, work):
        if tile.packed:
            fetch_packed(k, k_sf, num_keys, number, last, work.words, work.exponents)
        elif tile.bulk:
            fetch_whole(k, k_sf, number, last, shared.keys, shared.k_factors, shared.landing)
        else:
            fetch_copies(k, k_sf, number, last, shared.keys, shared.raw, shared.k_factors)

    @T.macro
    def expand_tile(number, last, shared, work):
        if number < last:
            if tile.packed:
                for c in T.unroll(tile.rounds):
                    row = (c * threads + T.get_thread_binding()) // groups
                    group = T.get_thread_binding() % groups
                    expand(
                        work.words, c * 4, work.exponents[c], shared.keys, number % tile.slots, row,
                        tile.keys, group, shared.k_factors, number % tile.factor_slots, work.wide,
                    )  # fmt: skip
            else:
                for i, j in T.Parallel(tile.keys, tile.depth):
                    shared.keys[number % tile.slots, i, j] = T.cast(
                        shared.raw[number % tile.stages, i, j], tile.unit
                    )

    @T.macro
    def landed(number, begin, landing):
        """Wait until the oldest copy in flight has completed."""
        if tile.bulk:
            slot = number % tile.stages
            T.mbarrier_wait_parity(landing[slot], (number - begin) // tile.stages % 2)
            T.sync_threads()
        else:
            if not tile.packed:
                T.ptx_wait_group(copies * (tile.stages - 2))
            publish()

    @T.macro
    def open_stream(k, k_sf, num_keys, begin, last, shared, work):
        for i in T.unroll(reach - 1):
            fetch(k, k_sf, num_keys, begin + i, last, shared, work)
        if tile.ahead:
            landed(begin, begin, shared.landing)
            expand_tile(begin, last, shared, work)
            fetch(k, k_sf, num_keys, begin + reach - 1, last, shared, work)

    @T.macro
    def arrive(number, begin, last, shared, work):
        landed(number, begin, shared.landing)
        if tile.expanded and not tile.ahead:
            expand_tile(number, last, shared, work)
            publish()

    @T.macro
    def forward(k, k_sf, num_keys, number, last, shared, work):
        if tile.ahead:
            expand_tile(number + 1, last, shared, work)
        fetch(k, k_sf, num_keys, number + reach - 1 + tile.ahead, last, shared, work)

    return open_stream, arrive, forward


# ---- keys expanded in memory ---------------------------------------------------------------------


@kernel(access_bits=lambda *_: ((8, 128), (32, 128)), pass_configs=EXPLICIT_GUARDS)
def expand_keys(depth: int) -> Any:
    """Keys in packed e2m1 as e4m3 in memory, each with a factor: once for all that score them.

    A thread has a group. A tile of keys is marked if e4m3 cannot hold one of them exactly.
    """
    num_keys, tiles = T.dynamic("num_keys tiles")
    groups = depth // GROUP
    threads = KEYS * groups
    expand = expansion(E4M3, groups)

    @T.prim_func
    def expand_tiles(
        k: T.Tensor[(num_keys, depth // 8), T.uint32],
        k_sf: T.Tensor[(num_keys, groups), T.uint8],
        out: T.Tensor[(1, num_keys, depth), E4M3],
        factors: T.Tensor[(1, num_keys), T.float32],
        marks: T.Tensor[(tiles, 1), T.int32],
    ):
        with T.Kernel(tiles, threads=threads) as tile:
            tx = T.get_thread_binding()
            wide = T.alloc_shared((1,), T.int32)
            words = T.alloc_local((4,), T.uint32)
            exponent = T.alloc_var(T.int32, init=0)
            key = tile * KEYS + tx // groups
            group = tx % groups
            if tx == 0:
                wide[0] = 0
            for e in T.unroll(4):
                words[e] = T.uint32(0)
            if key < num_keys:
                for e in T.vectorized(4):
                    words[e] = k[key, group * 4 + e]
                exponent = T.cast(k_sf[key, group], T.int32)
            T.sync_threads()
            expand(words, 0, exponent, out, 0, key, num_keys, group, factors, 0, wide)
            T.sync_threads()
            if tx == 0:
                marks[tile, 0] = wide[0]

    return expand_tiles
