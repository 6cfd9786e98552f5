"""Compression of keys and values: one entry for each window of tokens, and the gradients."""

import operator
from typing import Any

from tilelang import language as T

from tile_kernels.attention.geometry import Geometry, WindowPlan, bits_of, blocks_per_sm
from tile_kernels.attention.primitives import (
    PASS_CONFIGS,
    PRELUDE,
    above,
    bias_stage,
    clear_sums,
    each_row,
    each_series,
    exp2_flushed,
    over_groups,
    part_quotients,
    part_scores,
    part_sums,
    places_ahead,
    registers,
    row_loader,
    rows_ahead,
    series_types,
    shared_memory,
    thread_place,
    thread_sums,
    where_here,
    window_rows,
    window_walk,
)
from tile_kernels.runtime.kernels.common import WARP
from tile_kernels.runtime.launch import kernel


def compress_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    p = WindowPlan(*static)
    loads = {p.vector * bits_of(p.dtype), 32 * p.geometry.part}
    loads |= {32} if p.ragged else set()
    return tuple(sorted(loads)), min(128, p.vector * bits_of(p.out_dtype))


@kernel(access_bits=compress_access_bits, pass_configs=PASS_CONFIGS)
def compress(*static: Any) -> Any:
    """The entries of windows, rounded to the dtype of the result."""
    p = WindowPlan(*static)
    geo = p.geometry

    @T.macro
    def stored(window, num_windows, slot, group, lane, channel, entry, starts, out):
        written = T.alloc_local((geo.vector,), p.out_dtype)
        if group == 0 and window < num_windows and channel < p.channels:
            for v in T.unroll(geo.vector):
                written[v] = T.cast(entry[v], p.out_dtype)
            for v in T.vectorized(geo.vector):
                out[window, channel + v] = written[v]

    walked = window_walk(p, stored)
    tokens, num_windows = T.dynamic("tokens num_windows")
    given = series_types(p, tokens)

    @T.prim_func
    def compress_windows(
        kv_a: given.rows(0), z_a: given.rows(1), bias_a: given.biases(0),
        kv_b: given.rows(2), z_b: given.rows(3), bias_b: given.biases(1),
        starts: T.Tensor[(num_windows, 3), T.int32],
        out: T.Tensor[(num_windows, p.channels), p.out_dtype],
    ):  # fmt: skip
        with T.Kernel(
            T.min(T.ceildiv(num_windows, geo.slots), p.workers),
            geo.blocks_across,
            threads=geo.threads,
            prelude=PRELUDE,
        ) as (block, across):
            T.annotate_min_blocks_per_sm(blocks_per_sm(geo))
            given.assume_rows()
            given.assume_biases()
            walked(block, across, num_windows, kv_a, z_a, bias_a, kv_b, z_b, bias_b, starts, out)

    return compress_windows


# ---- where windows lie --------------------------------------------------------------------------

PLACING_THREADS = 128  # of the block that computes window starts; not measured


@kernel(access_bits=lambda *_: (32, 32), pass_configs=PASS_CONFIGS)
def place_windows(window: int) -> Any:
    """Where the windows of sequences lie, from the sequences' ends.

    The first kernel, one warp, makes the bounds increase inside `0..tokens` and counts windows; in
    the second a thread looks up its window's sequence. `counted[b]` windows are before sequence
    `b`. Of a window `starts` has its first row, that of the window before, and its position in its
    sequence; -1 where there is none.
    """
    num_bounds, num_windows = T.dynamic("num_bounds num_windows")

    @T.macro
    def scanned(lane, value, join):
        other = T.alloc_var(T.int32)
        for d in T.unroll(5):
            other = T.shfl_up(value[0], T.shift_left(1, d))
            if lane >= T.shift_left(1, d):
                value[0] = join(value[0], other)

    @T.prim_func
    def placed_windows(
        cu_seqlens: T.Tensor[(num_bounds,), T.int32],
        bounds: T.Tensor[(num_bounds,), T.int32],
        counted: T.Tensor[(num_bounds,), T.int32],
        starts: T.Tensor[(num_windows, 3), T.int32],
        tokens: T.int32,
    ):
        with T.Kernel(1, threads=WARP) as _:
            lane = T.get_thread_binding()
            bound = T.alloc_local((1,), T.int32)
            count = T.alloc_local((1,), T.int32)
            before = T.alloc_var(T.int32)
            last_bound = T.alloc_var(T.int32, init=0)
            all_counted = T.alloc_var(T.int32, init=0)
            for step in T.serial(T.ceildiv(num_bounds, WARP)):
                at = step * WARP + lane
                bound[0] = last_bound
                if at < num_bounds:
                    bound[0] = T.max(last_bound, T.min(cu_seqlens[at], tokens))
                scanned(lane, bound, T.max)
                before = T.shfl_up(bound[0], 1)
                if lane == 0:
                    before = last_bound
                if at == 0:
                    before = bound[0]  # nothing counts that is before the first sequence
                count[0] = T.truncdiv(bound[0] - before, window)
                scanned(lane, count, operator.add)
                if at < num_bounds:
                    bounds[at] = bound[0]
                    counted[at] = all_counted + count[0]
                all_counted = all_counted + T.shfl_sync(count[0], WARP - 1)
                last_bound = T.shfl_sync(bound[0], WARP - 1)
        with T.Kernel(T.ceildiv(num_windows, PLACING_THREADS), threads=PLACING_THREADS) as block:
            at = block * PLACING_THREADS + T.get_thread_binding()
            low = T.alloc_var(T.int32, init=1)  # the first bound with more windows before it
            high = T.alloc_var(T.int32, init=num_bounds)
            middle = T.alloc_var(T.int32)
            index = T.alloc_var(T.int32)
            first = T.alloc_local((3,), T.int32)
            if at < num_windows:
                while low < high:
                    middle = low + T.shift_right(high - low, 1)
                    if counted[middle] > at:
                        high = middle
                    else:
                        low = middle + 1
                for i in T.unroll(3):
                    first[i] = -1
                if low < num_bounds:
                    index = at - counted[low - 1]
                    first[2] = index * window
                    first[0] = bounds[low - 1] + first[2]
                    if index > 0:
                        first[1] = first[0] - window
                for i in T.unroll(3):
                    starts[at, i] = first[i]

    return placed_windows


# ---- gradients: weights are computed again, not kept ---------------------------------------------

SPLITS = 4  # blocks that share the rows after a sequence's last window
ADDING = 16  # groups of threads that share the sums of all blocks
LANES = 16  # threads of a group
IN_FLIGHT = 8  # sums that a thread reads at once
FINISHING_THREADS = ADDING * LANES


def gradients_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    p = WindowPlan(*static)
    vector, part = p.vector * bits_of(p.dtype), 32 * p.geometry.part
    loads = {vector, part, min(128, p.vector * bits_of(p.out_dtype))}
    loads |= {32} if p.ragged else set()
    return tuple(sorted(loads)), tuple(sorted({vector, part}))


def row_gradients(geo: Geometry, dtype: str, terms: bool) -> Any:
    """A macro: values and scores of a thread's rows become their gradients, in place.

    Of a value it is `p g`, of a score `p g (value - entry)`, with `p` the row's weight and `g` the
    gradient of the entry. `seen` takes the part's scores, or the `terms` of the sum that came of
    them, and returns the gradients of scores.
    """

    @T.macro
    def derived(first, item, q, kv, z, grad, tops, inverses, entries, seen):
        for e in T.unroll(geo.part):
            at = q * geo.part + e
            top = T.alloc_var(T.float32, init=above(tops[at]))
            for s in range(geo.series):
                for r in T.unroll(geo.items):
                    i = s * geo.items + r
                    term = T.alloc_var(T.float32, init=seen[i * geo.part + e])
                    if not terms:
                        term = exp2_flushed(T.ieee_sub(term, top))
                    value_grad = T.alloc_var(
                        T.float32, init=T.ieee_mul(T.ieee_mul(term, inverses[at]), grad[at])
                    )
                    value_grad = where_here(geo, s, first, item + r, value_grad, T.float32(0))
                    value = T.cast(kv[i * geo.vector + at], T.float32)
                    score_grad = T.alloc_var(
                        T.float32, init=T.ieee_mul(value_grad, T.ieee_sub(value, entries[at]))
                    )
                    score_grad = where_here(geo, s, first, item + r, score_grad, T.float32(0))
                    kv[i * geo.vector + at] = T.cast(value_grad, dtype)
                    z[i * geo.vector + at] = T.cast(score_grad, dtype)
                    seen[i * geo.part + e] = score_grad

    return derived


def row_storer(geo: Geometry) -> Any:
    """A macro: a thread's rows to tensors, as `each_series` does, where there are any."""

    @T.macro
    def store(target, row, channel, at, regs):
        for v in T.vectorized(geo.vector):
            target[row, channel + v] = regs[at * geo.vector + v]

    return each_series(geo, each_row(geo, store))


def zero_rows(p: WindowPlan) -> Any:
    """A macro: zeros to the rows from `begin` to `end - 1`, shared by `SPLITS` blocks.

    Values and scores of a series have the same `begin`.
    """

    @T.macro
    def zeroed(target, begin, end, split):
        zeros = T.alloc_local((p.vector,), p.dtype)
        for v in T.unroll(p.vector):
            zeros[v] = T.cast(T.float32(0), p.dtype)
        for iteration in T.serial(T.ceildiv(T.max(end - begin - split, 0), SPLITS)):
            row = T.alloc_var(T.int32, init=begin + iteration * SPLITS + split)
            for step in T.serial(-(-p.channels // (FINISHING_THREADS * p.vector))):
                channel = (step * FINISHING_THREADS + T.get_thread_binding()) * p.vector
                if channel < p.channels:
                    for v in T.vectorized(p.vector):
                        target[row, channel + v] = zeros[v]

    def all_zeroed(kv_a, z_a, kv_b, z_b, begin_a, begin_b, end, split):
        zeroed(kv_a, begin_a, end, split)
        zeroed(z_a, begin_a, end, split)
        if p.series == 2:
            zeroed(kv_b, begin_b, end, split)
            zeroed(z_b, begin_b, end, split)

    return all_zeroed


def bias_gradients(geo: Geometry) -> Any:
    """A macro: the sums of all blocks, added up for the positions of one of `blocks` more.

    Each group of threads has its share of the sums, and all groups are added in their order.
    """
    part = geo.part
    pieces = geo.channels // part
    positions = geo.series * geo.window * pieces

    @T.macro
    def added(block, partial, num_parts, grad_bias_a, grad_bias_b):
        lane = T.get_thread_binding() % LANES
        group = T.get_thread_binding() // LANES
        at = block * LANES + lane
        series = at // (geo.window * pieces)
        item = at // pieces % geo.window
        channel = at % pieces * part
        read = T.alloc_local((IN_FLIGHT * part,), T.float32)
        total = T.alloc_local((part,), T.float32)
        group_sums = T.alloc_shared((ADDING, LANES * part), T.float32)
        for e in T.unroll(part):
            total[e] = T.float32(0)
        if at < positions:
            for iteration in T.serial(T.ceildiv(num_parts, ADDING * IN_FLIGHT)):
                for i in T.unroll(IN_FLIGHT):
                    one = (iteration * ADDING + group) * IN_FLIGHT + i
                    for e in T.unroll(part):
                        read[i * part + e] = T.float32(0)
                    if one < num_parts:
                        for e in T.vectorized(part):
                            read[i * part + e] = partial[one, series, item, channel + e]
                for i in T.unroll(IN_FLIGHT):
                    for e in T.unroll(part):
                        total[e] = T.ieee_add(total[e], read[i * part + e])
        for e in T.vectorized(part):
            group_sums[group, lane * part + e] = total[e]
        T.sync_threads()
        if group == 0 and at < positions:
            for g in T.unroll(ADDING - 1):
                for e in T.unroll(part):
                    total[e] = T.ieee_add(total[e], group_sums[g + 1, lane * part + e])
            if series == 0:
                for e in T.vectorized(part):
                    grad_bias_a[item, channel + e] = total[e]
            if geo.series == 2:
                if series == 1:
                    for e in T.vectorized(part):
                        grad_bias_b[item, channel + e] = total[e]

    return added, -(-positions // (LANES * SPLITS))


@kernel(access_bits=gradients_access_bits, pass_configs=PASS_CONFIGS)
def gradients(*static: Any) -> Any:
    """The first kernel walks over windows, as the forward one does; each block has its own sums of
    bias gradients. The second adds those up, and zeroes the rows that no window takes.
    """
    p = WindowPlan(*static)
    geo, dtype, series = p.geometry, p.dtype, p.series
    found, staged = window_rows(geo, p.ragged), bias_stage(geo)
    load, store = row_loader(geo, dtype), row_storer(geo)
    summed, joined = thread_sums(geo, dtype, p.ahead), over_groups(geo)
    begin_rows, turn_rows = rows_ahead(geo, dtype, p.ragged)
    whole = geo.groups == 1 and geo.chunks == 1  # windows of one thread: nothing is computed twice
    scored, folded, divided = part_scores(geo), part_sums(geo), part_quotients(geo)
    derived, zeroed = row_gradients(geo, dtype, whole), zero_rows(p)
    added, adding = bias_gradients(geo)
    kept = geo.chunks == 1  # rows stay in registers, sums of bias gradients in shared memory
    tokens, num_windows, num_bounds, num_parts = T.dynamic(
        "tokens num_windows num_bounds num_parts"
    )
    given, results = series_types(p, tokens), series_types(p, tokens, "of_")

    @T.macro
    def read_gradient(grad_out, window, num_windows, channel, read):
        """That of a window's entry; zeros where there is none."""
        for v in T.unroll(geo.vector):
            read[v] = T.cast(T.float32(0), p.out_dtype)
        if window < num_windows and channel < p.channels:
            for v in T.vectorized(geo.vector):
                read[v] = grad_out[window, channel + v]

    @T.macro
    def add_to_own(q, seen, own):
        """To the thread's own sums, in shared memory."""
        tx = T.get_thread_binding()
        total = T.alloc_local((geo.part,), T.float32)
        for i in T.unroll(geo.rows):
            for e in T.vectorized(geo.part):
                total[e] = own[i * geo.parts + q, tx * geo.part + e]
            for e in T.unroll(geo.part):
                total[e] = T.ieee_add(total[e], seen[i * geo.part + e])
            for e in T.vectorized(geo.part):
                own[i * geo.parts + q, tx * geo.part + e] = total[e]

    @T.macro
    def stored_sums(partial, block, slot, group, channel, own):
        """The slots' sums, added in their order, to the block's own part."""
        tx = T.get_thread_binding()
        total = T.alloc_local((geo.part,), T.float32)
        T.sync_threads()
        if slot == 0 and channel < p.channels:
            for i in T.unroll(geo.rows):
                item = group * geo.items + i % geo.items
                if geo.exact or item < geo.window:
                    for q in T.unroll(geo.parts):
                        for e in T.unroll(geo.part):
                            total[e] = T.float32(0)
                        for other in T.serial(geo.slots):
                            for e in T.unroll(geo.part):
                                total[e] = T.ieee_add(
                                    total[e],
                                    own[
                                        i * geo.parts + q,
                                        (other * geo.lanes * geo.groups + tx) * geo.part + e,
                                    ],
                                )
                        for e in T.vectorized(geo.part):
                            partial[block, i // geo.items, item, channel + q * geo.part + e] = (
                                total[e]
                            )

    @T.macro
    def add_to_part(partial, block, step, item, q, channel, seen):
        """Long windows: the block's own part is where the sums grow."""
        total = T.alloc_local((geo.part,), T.float32)
        for i in T.unroll(geo.rows):
            if item + i % geo.items < geo.window:
                if step == 0:
                    for e in T.unroll(geo.part):
                        total[e] = seen[i * geo.part + e]
                else:
                    for e in T.vectorized(geo.part):
                        total[e] = partial[
                            block, i // geo.items, item + i % geo.items, channel + q * geo.part + e
                        ]
                    for e in T.unroll(geo.part):
                        total[e] = T.ieee_add(total[e], seen[i * geo.part + e])
                for e in T.vectorized(geo.part):
                    partial[
                        block, i // geo.items, item + i % geo.items, channel + q * geo.part + e
                    ] = total[e]

    @T.prim_func
    def gradients_of_windows(
        grad_out: T.Tensor[(num_windows, p.channels), p.out_dtype],
        kv_a: given.rows(0), z_a: given.rows(1), bias_a: given.biases(0),
        kv_b: given.rows(2), z_b: given.rows(3), bias_b: given.biases(1),
        bounds: T.Tensor[(num_bounds,), T.int32],
        counted: T.Tensor[(num_bounds,), T.int32],
        starts: T.Tensor[(num_windows, 3), T.int32],
        grad_kv_a: results.rows(0), grad_z_a: results.rows(1),
        grad_kv_b: results.rows(2), grad_z_b: results.rows(3),
        grad_bias_a: results.biases(0), grad_bias_b: results.biases(1),
        partial: T.Tensor[(num_parts, series, p.window, p.channels), T.float32],
    ):  # fmt: skip
        with T.Kernel(num_parts, geo.blocks_across, threads=geo.threads, prelude=PRELUDE) as (
            block,
            across,
        ):
            T.annotate_min_blocks_per_sm(blocks_per_sm(geo, gradient=True))
            given.assume_rows()
            results.assume_rows()
            given.assume_biases()
            tx = T.get_thread_binding()
            lane, group, slot, channel = thread_place(geo, across)
            biases, group_sums, window_sums = shared_memory(geo)
            own = T.alloc_shared(
                (geo.rows * geo.parts, geo.threads * geo.part) if kept else (1, 1), T.float32
            )
            kv, z, scores, tops, totals, sums, first, coming = registers(geo, dtype)
            kv_staged, z_staged = places_ahead(geo, dtype, p.ahead)
            read = T.alloc_local((geo.vector,), p.out_dtype)
            grad = T.alloc_local((geo.vector,), T.float32)
            if p.ahead:
                begin_rows(
                    block * geo.slots + slot, num_windows, starts, kv_a, z_a, kv_b, z_b, group,
                    channel, kv_staged, z_staged, coming,
                )  # fmt: skip
                read_gradient(grad_out, block * geo.slots + slot, num_windows, channel, read)
            if kept:
                for i in T.unroll(geo.rows * geo.parts):
                    for e in T.vectorized(geo.part):
                        own[i, tx * geo.part + e] = T.float32(0)
                staged(bias_a, 0, slot, group, lane, channel, biases)
                if series == 2:
                    staged(bias_b, 1, slot, group, lane, channel, biases)
                T.sync_threads()
            for step in T.serial(T.ceildiv(num_windows, geo.slots * num_parts)):
                window = T.alloc_var(T.int32, init=(step * num_parts + block) * geo.slots + slot)
                following = T.alloc_var(T.int32, init=window + num_parts * geo.slots)
                if p.ahead:
                    turn_rows(
                        following, num_windows, starts, kv_a, z_a, kv_b, z_b, group, channel,
                        kv_staged, z_staged, first, coming, kv, z,
                    )  # fmt: skip
                else:
                    found(starts, window, num_windows, first)
                    read_gradient(grad_out, window, num_windows, channel, read)
                if whole:
                    clear_sums(geo, tops, totals, sums)
                else:
                    summed(
                        kv_a, z_a, bias_a, kv_b, z_b, bias_b, biases, first, group, lane, channel,
                        kv, z, scores, tops, totals, sums,
                    )  # fmt: skip
                    joined(slot, group, lane, tops, totals, sums, group_sums, window_sums)
                for v in T.unroll(geo.vector):
                    grad[v] = T.cast(read[v], T.float32)
                if p.ahead:
                    read_gradient(grad_out, following, num_windows, channel, read)
                # Long windows start their sums also where there is no window.
                if (first[0] >= 0 or (not kept and step == 0)) and channel < p.channels:
                    for chunk in T.serial(geo.chunks):
                        item = T.alloc_var(T.int32, init=(chunk * geo.groups + group) * geo.items)
                        if not kept or (whole and not p.ahead):
                            load(kv_a, z_a, kv_b, z_b, first, item, channel, kv, z)
                        for q in T.unroll(geo.parts):
                            scored(first, item, lane, channel, q, z, bias_a, bias_b, biases, scores)
                            if whole:
                                folded(q, kv, scores, tops, totals, sums)
                                divided(q, totals, sums)
                            derived(first, item, q, kv, z, grad, tops, totals, sums, scores)
                            if kept:
                                add_to_own(q, scores, own)
                            else:
                                add_to_part(partial, block, step, item, q, channel, scores)
                        store(grad_kv_a, grad_z_a, grad_kv_b, grad_z_b, first, item, channel, kv, z)
            if kept:
                stored_sums(partial, block, slot, group, channel, own)
        with T.Kernel(
            adding + (num_bounds if p.ragged else 1), SPLITS, threads=FINISHING_THREADS
        ) as (block, split):
            results.assume_rows()
            results.assume_biases()
            if block < adding:
                added(block * SPLITS + split, partial, num_parts, grad_bias_a, grad_bias_b)
            else:
                sequence = T.alloc_var(T.int32, init=block - adding)
                begin = T.alloc_var(T.int32, init=0)
                end = T.alloc_var(T.int32, init=tokens)
                taken = T.alloc_var(T.int32, init=num_windows)  # windows of this sequence
                if p.ragged:
                    if sequence < num_bounds - 1:
                        begin = bounds[sequence]
                        end = bounds[sequence + 1]
                        taken = T.truncdiv(end - begin, p.window)
                        taken = T.max(T.min(taken, num_windows - counted[sequence]), 0)
                    else:  # what comes after all sequences, and before them
                        begin = bounds[num_bounds - 1]
                        taken = 0
                        zeroed(grad_kv_a, grad_z_a, grad_kv_b, grad_z_b, 0, 0, bounds[0], split)
                # Of series b the last window has no other one to go to.
                zeroed(
                    grad_kv_a, grad_z_a, grad_kv_b, grad_z_b,
                    begin + taken * p.window, begin + T.max(taken - 1, 0) * p.window, end, split,
                )  # fmt: skip

    return gradients_of_windows
