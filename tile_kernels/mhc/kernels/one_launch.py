"""All that comes before a sublayer in one launch, for many tokens.

The work is a list of items, which blocks draw in order: the products of some columns of a chunk of
tokens, then, some chunks later, what is made of them and the reading of a few of those tokens,
whose streams should still lie in the L2 cache. A block does its items in the order in which it drew
them. Those with products wait for nothing, the others only for products that were drawn before: so
the first item that is not done is never held up, and all come to an end, however many blocks the
device has room for.
"""

from typing import Any, NamedTuple

from tilelang import language as T
from tilelang.layout import make_swizzled_layout

from tile_kernels.mhc.kernels.common import (
    access,
    columns_of,
    load_columns,
    read_streams,
    store_columns,
)
from tile_kernels.mhc.kernels.fused import place_mix
from tile_kernels.mhc.kernels.projection import (
    UNIT,
    cut_weights,
    fetch_step,
    inverse_norm,
    multiply_step,
    product_plan,
    step_plan,
)
from tile_kernels.mhc.kernels.sinkhorn import lanes_of, sinkhorn
from tile_kernels.mhc.projection import CHUNK as TILE
from tile_kernels.mhc.projection import MOST_ROWS, SPAN, count_spans, padded, stored_columns
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP, is_last_block
from tile_kernels.runtime.launch import kernel

THREADS = 2 * TILE
RESIDENT = 2  # blocks of a multiprocessor, where they fit
RESERVED = 1024  # bytes of shared memory of a block that are the driver's
TOKENS = 2  # of an item that reads, at most
LAG = 2  # chunks whose products are drawn before one is read
AT_ONCE = 2  # turns of a row whose loads are under way together
COUNTERS = 2  # before the counters of chunks: items drawn, blocks done


class Plan(NamedTuple):
    """`together` spans are summed first. `blocks` draw items, those that read of `tokens` each.

    `unit`, `depth`, `stages` and `fenced` as for the projection alone.
    """

    streams: int
    hidden: int
    vector: int
    unit: int
    depth: int
    stages: int
    tokens: int
    together: int
    near: bool
    saving: bool
    resident: int
    blocks: int
    fenced: bool


def plan(
    streams: int,
    hidden: int,
    alignment: int,
    together: int,
    near: bool,
    saving: bool,
    device: Device,
) -> Plan:
    mixes = streams * (streams + 2)
    rows = MOST_ROWS + 1
    alone = product_plan(mixes, padded(mixes), streams * hidden, rows, 1, together, device)
    unit = min(alone.depth, UNIT)  # the same, for the same bits
    tokens = TOKENS if TOKENS * mixes <= THREADS else 1
    groups = -(-count_spans(streams * hidden) // together)
    of_mixes = 4 * (1 + tokens * (groups * (mixes + 1) + streams * (streams + 1)))
    for resident in (RESIDENT, 1) if streams <= 4 else (1,):  # which take many registers
        room = min(device.smem_per_block, device.smem_per_sm // resident - RESERVED) - of_mixes
        depth, stages = step_plan(mixes, padded(mixes), TILE, room, UNIT)
        if depth >= unit:
            break
    stages = min(stages, SPAN // depth + 1)
    vector = access(columns_of(hidden), 2, alignment)
    return Plan(
        streams, hidden, vector, unit, depth, stages, tokens, together, near, saving, resident,
        resident * device.num_sms, alone.fenced,
    )  # fmt: skip


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    row = 16 * Plan(*static).vector
    return tuple(sorted({32, row})), tuple(sorted({32, 64, row}))


def sum_of_group(spans: int, together: int) -> Any:
    """A macro: the sum of the `together` spans of a group, in order."""

    @T.macro
    def added(values, group, token, mix, total):
        total[0] = values[group * together, token, mix]
        for i in T.unroll(together - 1):
            if group * together + i + 1 < spans:
                total[0] = T.ieee_add(total[0], values[group * together + i + 1, token, mix])

    return added


@kernel(
    plan=plan,
    access_bits=access_bits,
    # All barriers are written out.
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def pre_in_one(*static: Any) -> Any:
    """Items in the order of `steps`: in each, the products of a chunk and the reading of another.

    `counters[first]` counts items, the next one blocks that are done, the others the spans that are
    there of each chunk. All are zero before, and again afterwards.
    """
    plan = Plan(*static)
    streams, hidden, depth, stages = plan.streams, plan.hidden, plan.depth, plan.stages
    size, count = streams * hidden, streams * (streams + 2)
    width, spans, steps = padded(count), count_spans(size), SPAN // depth
    groups = -(-spans // plan.together)
    sums_of_token = groups * (count + 1)  # of the mixes and of the squares
    stored = stored_columns(count)
    reads = TILE // plan.tokens  # items of a chunk that read
    items = spans + reads
    unit, lanes, columns = plan.unit, lanes_of(streams), columns_of(hidden)
    units = hidden // columns
    pieces = -(-units // (AT_ONCE * THREADS))  # of a token
    fetch = fetch_step(count, size, TILE, depth)
    cut = cut_weights(count, width, depth, depth, THREADS)
    multiply = multiply_step(width, TILE, depth, unit)
    add_first = sum_of_group(spans, plan.together)
    placed = place_mix(streams, plan.saving)
    load = load_columns(columns, plan.vector)
    store = store_columns(columns, plan.vector)
    read = read_streams(streams, columns)
    normalized = sinkhorn(streams, plan.near)
    num_tokens, num_counters = T.dynamic("num_tokens num_counters")

    @T.macro
    def told(drawn, following):
        """What the first thread has drawn, to all; a barrier before and after."""
        T.sync_threads()
        if T.get_thread_binding() == 0:
            drawn[0] = following
        T.sync_threads()
        return drawn[0]

    @T.macro
    def load_turns(residual, token, piece, raw):
        """The columns of a thread in some turns of a row, the loads together."""
        for now in tuple(range(AT_ONCE)):
            at = (piece * AT_ONCE + now) * THREADS + T.get_thread_binding()
            if at < units:
                for i in T.unroll(streams):
                    load(residual, token, i, at * columns, raw[now], i)

    @T.macro
    def publish(counters, place):
        """What all threads wrote can be read by who sees the counter."""
        T.call_extern("handle", "__threadfence")
        T.sync_threads()
        if T.get_thread_binding() == 0:
            T.atomic_add(counters[place], 1)

    @T.macro
    def await_count(counters, place, wanted):
        """Wait for what `publish` counts."""
        if T.get_thread_binding() == 0:
            while T.atomic_load(counters[place], "acquire") < wanted:
                T.call_extern("handle", "__nanosleep", T.uint32(64))
        T.sync_threads()
        T.call_extern("handle", "__threadfence")

    @T.prim_func
    def drawn_items(
        x: T.Tensor[(num_tokens, size), T.bfloat16],
        fn: T.Tensor[(count, size), T.float32],
        residual: T.Tensor[(num_tokens, streams, hidden), T.bfloat16],
        mul: T.Tensor[(spans, num_tokens, stored), T.float32],
        squares: T.Tensor[(spans, num_tokens, 1), T.float32],
        scale: T.Tensor[(3,), T.float32],
        base: T.Tensor[(count,), T.float32],
        post: T.Tensor[(num_tokens, streams), T.float32],
        comb: T.Tensor[(num_tokens, streams, streams), T.float32],
        out: T.Tensor[(num_tokens, 1, hidden), T.bfloat16],
        saved_mixes: T.Tensor[(num_tokens, count), T.float32],
        saved_mul: T.Tensor[(num_tokens, count), T.float32],
        saved_squares: T.Tensor[(num_tokens,), T.float32],
        saved_pre: T.Tensor[(num_tokens, streams), T.float32],
        saved_logits: T.Tensor[(num_tokens, streams, streams), T.float32],
        counters: T.Tensor[(num_counters,), T.int32],
        first: T.int32,
        rms_eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        repeat: T.int32,
    ):
        with T.Kernel(plan.blocks, threads=THREADS):
            T.annotate_min_blocks_per_sm(plan.resident)
            tx = T.get_thread_binding()
            drawn = T.alloc_shared((1,), T.int32)
            of_x = T.alloc_shared((stages, TILE, depth), T.bfloat16)
            of_fn = T.alloc_shared((stages, count, depth), T.float32)
            parts = T.alloc_shared((2 * width, depth), T.bfloat16)
            pre = T.alloc_shared((plan.tokens, streams), T.float32)
            logits = T.alloc_shared((plan.tokens, streams, streams), T.float32)
            held = T.alloc_fragment((TILE, unit), T.bfloat16)
            sums = T.alloc_fragment((TILE, width), T.float32)
            squared = T.alloc_fragment((TILE, unit), T.float32)
            of_rows = T.alloc_fragment((TILE,), T.float32)
            of_groups = T.alloc_shared((plan.tokens, groups, count + 1), T.float32)
            part = T.alloc_local((1,), T.float32)
            totals = T.alloc_local((3,), T.float32)
            weights = T.alloc_local((streams,), T.float32)
            raw = [T.alloc_local((streams, columns), T.bfloat16) for _ in range(AT_ONCE)]
            total = T.alloc_local((columns,), T.float32)
            matrix = T.alloc_local((streams,), T.float32)
            saved = (saved_mixes, saved_mul, saved_squares, saved_pre, saved_logits)
            T.annotate_layout({of_x: make_swizzled_layout(of_x)})
            chunks = T.ceildiv(num_tokens, TILE)
            following = T.alloc_var(T.int32, init=0)
            item = T.alloc_var(T.int32)
            if tx == 0:
                following = T.atomic_add(counters[first], 1, return_prev=True)
            item = told(drawn, following)
            while item < (chunks + LAG) * items:
                if tx == 0:  # drawn early, which takes its time
                    following = T.atomic_add(counters[first], 1, return_prev=True)
                step = item // items
                inside = item % items
                reading = inside * reads // items  # items that read, before this one
                if (inside + 1) * reads // items == reading:
                    if step < chunks:
                        span = inside - reading
                        T.clear(sums)
                        T.clear(squared)
                        for ahead in T.serial(stages - 1):
                            fetch(
                                x, fn, of_x, of_fn, step * TILE, num_tokens,
                                span * SPAN + ahead * depth, ahead,
                            )  # fmt: skip
                        for i in T.serial(steps):
                            T.ptx_wait_group(stages - 2)
                            T.sync_threads()
                            if i + stages - 1 < steps:
                                ahead = i + stages - 1
                                fetch(
                                    x, fn, of_x, of_fn, step * TILE, num_tokens,
                                    span * SPAN + ahead * depth, ahead % stages,
                                )  # fmt: skip
                            else:
                                T.ptx_commit_group()
                            cut(of_fn, i % stages, 0, parts)
                            if plan.fenced:
                                T.fence_proxy_async()
                            T.sync_threads()
                            multiply(of_x, i % stages, parts, held, sums, squared)
                        T.reduce_sum(squared, of_rows, dim=1)
                        for i, j in T.Parallel(TILE, width):
                            if step * TILE + i < num_tokens and j < stored:
                                mul[span, step * TILE + i, j] = sums[i, j]
                        for i in T.Parallel(TILE):
                            if step * TILE + i < num_tokens:
                                squares[span, step * TILE + i, 0] = of_rows[i]
                        publish(counters, first + COUNTERS + step)
                else:
                    start = (step - LAG) * TILE + reading * plan.tokens
                    if step >= LAG and start < num_tokens:
                        here = T.alloc_var(T.int32)
                        here = T.min(plan.tokens, num_tokens - start)  # tokens
                        load_turns(residual, start, 0, raw)
                        await_count(counters, first + COUNTERS + step - LAG, spans)
                        for turn in T.unroll(-(-plan.tokens * sums_of_token // THREADS)):
                            slot = (turn * THREADS + tx) // sums_of_token
                            group = (turn * THREADS + tx) % sums_of_token // (count + 1)
                            mix = (turn * THREADS + tx) % (count + 1)
                            if slot < here:
                                if mix < count:
                                    add_first(mul, group, start + slot, mix, part)
                                else:
                                    add_first(squares, group, start + slot, 0, part)
                                of_groups[slot, group, mix] = part[0]
                        T.sync_threads()
                        if tx // count < here:
                            slot = tx // count
                            mix = tx % count
                            totals[0] = of_groups[slot, 0, mix]
                            totals[1] = of_groups[slot, 0, count]
                            for i in T.unroll(groups - 1):
                                totals[0] = T.ieee_add(totals[0], of_groups[slot, i + 1, mix])
                                totals[1] = T.ieee_add(totals[1], of_groups[slot, i + 1, count])
                            totals[2] = inverse_norm(totals[1], size, rms_eps)
                            placed(
                                totals, start + slot, mix, True, (pre_eps, post_mult),
                                (scale, base), post, saved, pre, logits, slot,
                            )  # fmt: skip
                        T.sync_threads()
                        for piece in T.serial(here * pieces):
                            for i in T.unroll(streams):
                                weights[i] = pre[piece // pieces, i]
                            for now in tuple(range(AT_ONCE)):
                                at = (piece % pieces * AT_ONCE + now) * THREADS + tx
                                if at < units:
                                    read(weights, raw[now], total)
                                    store(total, out, start + piece // pieces, 0, at * columns)
                            if piece + 1 < here * pieces:
                                following_token = start + (piece + 1) // pieces
                                load_turns(residual, following_token, (piece + 1) % pieces, raw)
                        if tx >= THREADS - WARP:  # which have less to read, if not all the same
                            for turn in T.serial(-(-plan.tokens * lanes // WARP)):
                                place = turn * (WARP // lanes) + tx % WARP // lanes
                                row = tx % lanes
                                for c in T.unroll(streams):
                                    matrix[c] = T.float32(0)
                                if row < streams and place < here:
                                    for c in T.unroll(streams):
                                        matrix[c] = logits[place, row, c]
                                normalized(matrix, row, repeat, sinkhorn_eps)
                                if row < streams and place < here:
                                    for c in T.unroll(streams):
                                        comb[start + place, row, c] = matrix[c]
                item = told(drawn, following)
            if is_last_block(counters, first + 1, plan.blocks):
                for i in T.serial(T.ceildiv(chunks + COUNTERS, THREADS)):
                    if i * THREADS + tx < chunks + COUNTERS:
                        counters[first + i * THREADS + tx] = 0

    return drawn_items
