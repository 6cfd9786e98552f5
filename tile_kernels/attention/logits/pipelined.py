"""The scores of keys for many queries, on Hopper: roles for warps, one stream of keys for a block.

Two warpgroups multiply each tile of keys with 256 columns (query, head) each, so that keys are read
once for 512 columns. A third one starts copies of tiles into a ring, from which a warpgroup takes
them as it comes to them: while one weights and adds, the other multiplies. There is no barrier of
the block in the loop, and nothing but keys passes through shared memory:

- accumulators are in registers of each thread, and so are the weights of its columns;
- a thread has sums over the heads of its columns for two keys and all its queries. Four threads
  have the other heads. They exchange sums so that each adds up and stores a quarter of them.

Sums are added in the order of `score_primitives`, to the same bits.
"""

from typing import Any, NamedTuple

from tilelang import language as T
from tilelang.layout import make_wgmma_swizzled_layout

from tile_kernels.attention.indexer_plan import BF16, E4M3, MARKING, SIZE, WARPGROUP_COLUMNS, Tile
from tile_kernels.attention.score_primitives import (
    load_queries,
    marks_of,
    query_ranges,
    score_types,
)
from tile_kernels.runtime.device import WARP

WARPGROUP = 128
# Of 65536 for each SM; 24 for the thread that starts copies would do.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
LANES = 4  # threads that have the columns of a key
SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes of a row in a panel to the mode of wgmma's descriptors
STEP = 32  # bytes of a row that a matrix instruction multiplies
UNIT = 16  # bytes that descriptors count in


class Registers(NamedTuple):
    """What a consumer has for a tile: `sums` of two keys and each query, then a quarter of them."""

    products: Any
    weights: Any
    sums: Any
    found: Any


@T.macro
def registers(tile):
    """A `Registers`."""
    products = T.alloc_local((WARPGROUP_COLUMNS // 2,), T.float32)
    weights = T.alloc_local((WARPGROUP_COLUMNS // LANES,), T.float32)
    sums = T.alloc_local((2 * tile.warpgroup_queries,), T.float32)
    found = T.alloc_local((tile.warpgroup_queries // 2,), T.float32)
    return products, weights, sums, found


class Operands(NamedTuple):
    """Descriptors of the keys and of the warpgroup's queries in shared memory."""

    keys: Any
    queries: Any


def product_of(tile: Tile) -> Any:
    """Macros: `describe` operands in shared memory; `multiply` the keys in a slot with the columns
    of a warpgroup, which goes on behind."""
    row = tile.depth * SIZE[tile.unit]
    panel = min(row, 128)  # bytes; longer rows are cut, one panel of all rows after the other
    inputs, k = ("e4m3", 32) if tile.unit == E4M3 else ("bf16", 16)

    def offset(step: Any, rows: int) -> Any:
        """Where a step begins, in operands of so many rows."""
        at = step * STEP
        return (at // panel * rows * panel + at % panel) // UNIT

    @T.macro
    def describe(queries, keys, group, operands):
        T.initialize_wgmma_descriptor(
            operands.keys, keys.access_ptr("r"), SWIZZLES[panel], 1, 8 * panel // UNIT
        )
        T.initialize_wgmma_descriptor(
            operands.queries, queries.access_ptr("r"), SWIZZLES[panel], 1, 8 * panel // UNIT
        )
        T.increase_descriptor_offset(operands.queries, group * WARPGROUP_COLUMNS * panel)

    @T.macro
    def multiply(operands, slot, products):
        T.warpgroup_fence_operand(products, num_regs=WARPGROUP_COLUMNS // 2)
        T.warpgroup_arrive()
        for step in T.unroll(row // STEP):
            T.ptx_wgmma_ss(
                "float32", f"m64n{WARPGROUP_COLUMNS}k{k}", True, True, inputs, inputs, "fp32",
                operands.keys.data, slot * (tile.keys * row // UNIT) + offset(step, tile.keys),
                operands.queries.data, offset(step, tile.columns),
                products.data, 0, T.Select(step > 0, 1, 0), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(products, num_regs=WARPGROUP_COLUMNS // 2)

    return describe, multiply


def sums_of(tile: Tile) -> Any:
    """Macros: `weigh` products and add those of a thread; `exchange`, after which each of four
    threads has the sums of all heads for one of two keys and one of each two queries."""
    queries, groups = tile.warpgroup_queries, tile.padded // 8  # of columns, 2 for each thread

    @T.macro
    def weigh(r):
        for t in T.unroll(queries):
            for half in T.unroll(2):
                r.sums[2 * t + half] = T.float32(0)
                for e in T.unroll(2):
                    for j in T.unroll(groups):
                        product = r.products[4 * (groups * t + j) + 2 * half + e]
                        weight = r.weights[2 * (groups * t + j) + e]
                        if tile.unit == E4M3:  # weights are half of what they are
                            r.sums[2 * t + half] += (product + T.abs(product)) * weight
                        else:
                            positive = T.max(T.reinterpret(product, T.int32), 0)
                            r.sums[2 * t + half] += T.reinterpret(positive, T.float32) * weight

    @T.macro
    def exchange(r, odd, high):
        """Lanes 2 apart keep one of two queries each, then neighbours one of two keys."""
        kept = T.alloc_local((queries,), T.float32)
        for v in T.unroll(queries):
            first = r.sums[v // 2 * 4 + v % 2]
            second = r.sums[v // 2 * 4 + v % 2 + 2]
            kept[v] = T.if_then_else(high, second, first)
            kept[v] += T.shfl_xor(T.if_then_else(high, first, second), 2)
        for v in T.unroll(queries // 2):
            r.found[v] = T.if_then_else(odd, kept[2 * v + 1], kept[2 * v])
            r.found[v] += T.shfl_xor(T.if_then_else(odd, kept[2 * v], kept[2 * v + 1]), 1)

    return weigh, exchange


class Memory(NamedTuple):
    """What a block has in shared memory. `landed` and `free` are barriers of each slot of keys."""

    queries: Any
    keys: Any
    q_factors: Any
    weights: Any
    k_factors: Any
    bounds: Any
    wide: Any
    landed: Any
    free: Any


@T.macro
def memory(tile):
    """A `Memory`."""
    queries = T.alloc_shared((1, tile.columns, tile.depth), tile.unit)
    keys = T.alloc_shared((tile.stages, tile.keys, tile.depth), tile.unit)
    T.annotate_layout(
        {queries: make_wgmma_swizzled_layout(queries), keys: make_wgmma_swizzled_layout(keys)}
    )
    q_factors = T.alloc_shared((1, tile.columns), T.float32)
    weights = T.alloc_shared((tile.columns,), T.float32)
    k_factors = T.alloc_shared((tile.stages, tile.keys), T.float32)
    bounds = T.alloc_shared((2, tile.queries), T.int32)
    wide = T.alloc_shared((1,), T.int32)
    landed = T.alloc_barrier([1] * tile.stages)
    free = T.alloc_barrier([tile.threads // WARP] * tile.stages)
    return queries, keys, q_factors, weights, k_factors, bounds, wide, landed, free


def pipelined_scores(tile: Tile, out_dtype: str, role: str) -> Any:
    """A block has some queries and a share of the keys, `share_keys`, a multiple of a tile."""
    types = score_types(tile)
    tokens, num_keys = types.tokens, types.num_keys
    keys, queries, stages, consumers = tile.keys, tile.queries, tile.stages, tile.threads
    fillers = WARPGROUP - WARP  # threads beside the warp that copies
    load = load_queries(tile)
    load_ranges, span = query_ranges(tile)
    _, _, begin_marks = marks_of(tile)
    describe, multiply = product_of(tile)
    weigh, exchange = sums_of(tile)

    @T.macro
    def fill(out, first, begin, end, thread):
        """No logits for these keys."""
        for t in T.serial(queries):
            if first + t < tokens:
                for i in T.serial(T.ceildiv(end - begin, fillers)):
                    key = begin + i * fillers + thread
                    if key < end:
                        out[first + t, key] = T.cast(-T.infinity(T.float32), out_dtype)

    @T.macro
    def produce(k, k_sf, out, first, share, share_keys, begin, last, m):
        """A warp copies the tiles; the others write the logits of keys that no query has."""
        T.set_max_nreg(PRODUCER_REGISTERS, 0)
        thread = T.get_thread_binding() - consumers
        if thread < WARP:
            for number in T.serial(begin, last):
                n = number - begin
                row = number * keys
                slot = n % stages
                T.mbarrier_wait_parity(m.free[slot], (n // stages + 1) % 2)
                T.tma_copy(
                    k[row : row + keys, 0 : tile.depth], m.keys[slot, :, :], barrier=m.landed[slot]
                )
                if tile.key_format != BF16:
                    T.tma_copy(k_sf[row : row + keys], m.k_factors[slot, :], barrier=m.landed[slot])
                if thread == 0:
                    T.barrier_arrive(m.landed[slot])
        else:
            share_begin = share * share_keys
            share_end = share_begin + T.min(share_keys, num_keys - share_begin)
            before = T.alloc_var(T.int32, init=share_end)
            after = T.alloc_var(T.int32, init=share_end)
            if begin < last:
                before = T.min(begin * keys, share_end)
                after = T.min(last * keys, share_end)
            fill(out, first, share_begin, before, thread - WARP)
            fill(out, first, after, share_end, thread - WARP)

    @T.macro
    def consume(q, q_sf, weights, marks, out, first, share, begin, last, m):
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        tx = T.get_thread_binding()
        lane = tx % WARP
        group = tx // WARPGROUP
        r = Registers(*registers(tile))
        operands = Operands(T.alloc_wgmma_desc(), T.alloc_wgmma_desc())
        load(q, q_sf, weights, first, tokens, m.queries, m.q_factors, m.weights, m.wide)
        T.sync_threads(1, consumers)
        if role == MARKING:  # noqa: SIM102
            if tx < queries and first + tx < tokens:
                marks[first + tx, share] = m.wide[0]
        for j in T.unroll(WARPGROUP_COLUMNS // 8):
            for e in T.vectorized(2):
                column = group * WARPGROUP_COLUMNS + 8 * j + 2 * (lane % LANES)
                r.weights[2 * j + e] = m.weights[column + e]
        # The key of a tile and, of each two queries, the one whose logit this thread stores.
        odd = T.alloc_var(T.bool, init=lane % 2 == 1)
        high = T.alloc_var(T.bool, init=lane % LANES >= 2)
        row = T.alloc_var(T.int32, init=tx % WARPGROUP // WARP * 16 + lane % 2 * 8 + lane // LANES)
        first_query = T.alloc_var(T.int32)
        first_query = group * tile.warpgroup_queries + lane % LANES // 2
        # Keys in range of all queries of the warpgroup.
        range_begin = T.alloc_var(T.int32, init=0)
        range_end = T.alloc_var(T.int32, init=num_keys)
        for t in T.unroll(tile.warpgroup_queries):
            range_begin = T.max(range_begin, m.bounds[0, group * tile.warpgroup_queries + t])
            range_end = T.min(range_end, m.bounds[1, group * tile.warpgroup_queries + t])
        describe(m.queries, m.keys, group, operands)
        factor = T.alloc_var(T.float32, init=T.float32(1))
        slot = T.alloc_var(T.int32, init=0)
        phase = T.alloc_var(T.int32, init=0)
        for number in T.serial(begin, last):
            T.mbarrier_wait_parity(m.landed[slot], phase)
            multiply(operands, slot, r.products)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(r.products, num_regs=WARPGROUP_COLUMNS // 2)
            if tile.key_format != BF16:
                factor = m.k_factors[slot, row]
            T.sync_warp()
            if lane == 0:
                T.barrier_arrive(m.free[slot])
            slot = slot + 1
            if slot == stages:
                slot = 0
                phase = 1 - phase
            weigh(r)
            exchange(r, odd, high)
            key = number * keys + row
            for v in T.unroll(tile.warpgroup_queries // 2):
                t = first_query + 2 * v
                if tile.key_format != BF16:
                    r.found[v] = r.found[v] * factor
                if number * keys >= range_begin and (number + 1) * keys <= range_end:
                    out[first + t, key] = T.cast(r.found[v], out_dtype)
                elif first + t < tokens and key < num_keys:
                    inside = key >= m.bounds[0, t] and key < m.bounds[1, t]
                    out[first + t, key] = T.cast(
                        T.if_then_else(inside, r.found[v], -T.infinity(T.float32)), out_dtype
                    )

    @T.prim_func
    def score_many(
        q: types.q, q_sf: types.q_sf, k: types.k, k_sf: types.k_sf, k_marks: types.k_marks,
        weights: types.weights, start: types.start, end: types.end, marks: types.marks,
        out: T.Tensor[(tokens, num_keys), out_dtype],
        share_keys: T.int32,
        block_queries: T.int32,  # noqa: ARG001
    ):  # fmt: skip
        with types.grid(tile, 1, share_keys) as (block, share):
            m = Memory(*memory(tile))
            between = T.alloc_local((2,), T.int32)
            first = block * queries
            begin_marks(k_marks, num_keys, share, share_keys, m.wide)
            load_ranges(start, end, first, tokens, num_keys, m.bounds)
            T.sync_threads()
            span(m.bounds, num_keys, share, share_keys // keys, between)
            begin = T.alloc_var(T.int32, init=between[0])
            last = T.alloc_var(T.int32, init=between[1])
            with T.ws(*range(consumers // WARPGROUP)):
                consume(q, q_sf, weights, marks, out, first, share, begin, last, m)
            with T.ws(consumers // WARPGROUP):
                produce(k, k_sf, out, first, share, share_keys, begin, last, m)

    return score_many
