"""Compression of keys and values: one entry for each window of tokens."""

import operator
from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.geometry import Geometry, blocks_per_sm, geometry
from tile_kernels.attention.kernels.common import (
    PASS_CONFIGS,
    PRELUDE,
    as_given,
    assume_multiples,
    bias_stage,
    bits_of,
    can_copy_ahead,
    over_groups,
    part_scores,
    part_sums,
    places_ahead,
    registers,
    row_loader,
    rows_ahead,
    shared_memory,
    thread_place,
    window_rows,
)
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.launch import kernel


class Plan(NamedTuple):
    channels: int
    window: int
    series: int
    ragged: bool
    dtype: str
    out_dtype: str
    vector: int
    ahead: bool  # copy the rows of the next window while one is computed
    workers: int = 0  # blocks that share the windows, if that is not up to the launch

    @property
    def geometry(self) -> Geometry:
        """How threads share windows."""
        return geometry(self.channels, self.window, self.series, self.vector)


def plan(
    channels: int,
    window: int,
    series: int,
    ragged: bool,
    dtype: str,
    out_dtype: str,
    vector: int,
    device: Device,
) -> Plan:
    """As many blocks as can run at a time: each walks over windows with its biases at hand."""
    geo = geometry(channels, window, series, vector)
    workers = max(1, blocks_per_sm(geo) * device.num_sms // geo.blocks_across)
    ahead = can_copy_ahead(geo, dtype, blocks_per_sm(geo), device)
    return Plan(channels, window, series, ragged, dtype, out_dtype, vector, ahead, workers)


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    p = Plan(*static)
    loads = {p.vector * bits_of(p.dtype), 32 * p.geometry.part}
    loads |= {32} if p.ragged else set()
    return tuple(sorted(loads)), min(128, p.vector * bits_of(p.out_dtype))


@T.macro
def clear_sums(geo, tops, totals, sums):
    """Before the first row."""
    for v in T.unroll(geo.vector):
        tops[v] = -T.infinity(T.float32)
        totals[v] = T.float32(0)
        sums[v] = T.float32(0)


def thread_sums(geo: Geometry, dtype: str, loaded: bool) -> Any:
    """A macro: the maxima, sums and weighted sums of a thread's rows of one window.

    `kv`, `z` are the registers for rows, which are `loaded`, or all loads go out before the first
    is used.
    """
    load = row_loader(geo, dtype)
    scored, folded = part_scores(geo), part_sums(geo)

    @T.macro
    def summed(
        kv_a, z_a, bias_a, kv_b, z_b, bias_b, biases, first, group, lane, channel,
        kv, z, scores, tops, totals, sums,
    ):  # fmt: skip
        clear_sums(geo, tops, totals, sums)
        if first[0] >= 0 and channel < geo.channels:
            for chunk in T.serial(geo.chunks):
                item = T.alloc_var(T.int32, init=(chunk * geo.groups + group) * geo.items)
                if not loaded:
                    load(kv_a, z_a, kv_b, z_b, first, item, channel, kv, z)
                for q in T.unroll(geo.parts):
                    scored(first, item, lane, channel, q, z, bias_a, bias_b, biases, scores)
                    folded(q, kv, scores, tops, totals, sums)

    return summed


def window_walk(p: Plan, finish: Any) -> Any:
    """A macro: a block's way over its windows. `finish` takes the entry of each, all threads at it.

    `results` is whatever `finish` needs, from outside of the walk.
    """
    geo, dtype = p.geometry, p.dtype
    found, staged = window_rows(geo, p.ragged), bias_stage(geo)
    summed, joined = thread_sums(geo, dtype, p.ahead), over_groups(geo)
    begin_rows, turn_rows = rows_ahead(geo, dtype, p.ragged)

    @T.macro
    def walked(
        block, across, num_windows, kv_a, z_a, bias_a, kv_b, z_b, bias_b, places, results
    ):  # fmt: skip
        lane, group, slot, channel = thread_place(geo, across)
        biases, of_groups, of_window = shared_memory(geo)
        kv, z, scores, tops, totals, sums, first, coming = registers(geo, dtype)
        kv_places, z_places = places_ahead(geo, dtype, p.ahead)
        workers = T.min(T.ceildiv(num_windows, geo.slots), p.workers)
        if p.ahead:
            begin_rows(
                block * geo.slots + slot, num_windows, places, kv_a, z_a, kv_b, z_b, group, channel,
                kv_places, z_places, coming,
            )  # fmt: skip
        if geo.chunks == 1:
            staged(bias_a, 0, slot, group, lane, channel, biases)
            if geo.series == 2:
                staged(bias_b, 1, slot, group, lane, channel, biases)
            T.sync_threads()
        for step in T.serial(T.ceildiv(num_windows, geo.slots * workers)):
            window = T.alloc_var(T.int32, init=(step * workers + block) * geo.slots + slot)
            if p.ahead:
                turn_rows(
                    window + workers * geo.slots, num_windows, places, kv_a, z_a, kv_b, z_b, group,
                    channel, kv_places, z_places, first, coming, kv, z,
                )  # fmt: skip
            else:
                found(places, window, num_windows, first)
            summed(
                kv_a, z_a, bias_a, kv_b, z_b, bias_b, biases, first, group, lane, channel,
                kv, z, scores, tops, totals, sums,
            )  # fmt: skip
            joined(slot, group, lane, tops, totals, sums, of_groups, of_window)
            finish(window, num_windows, slot, group, lane, channel, sums, places, results)

    return walked


@kernel(plan=plan, access_bits=access_bits, pass_configs=PASS_CONFIGS)
def compress(*static: Any) -> Any:
    """Entries as they are."""
    p = Plan(*static)
    geo, dtype = p.geometry, p.dtype

    @T.macro
    def stored(window, num_windows, slot, group, lane, channel, entry, places, out):
        written = T.alloc_local((geo.vector,), p.out_dtype)
        if group == 0 and window < num_windows and channel < p.channels:
            for v in T.unroll(geo.vector):
                written[v] = T.cast(entry[v], p.out_dtype)
            for v in T.vectorized(geo.vector):
                out[window, channel + v] = written[v]

    walked = window_walk(p, stored)
    tokens, num_windows = T.dynamic("tokens num_windows")
    rows = T.dynamic("kv_a_row z_a_row kv_b_row z_b_row", "int64")
    bias_rows = T.dynamic("bias_a_row bias_b_row", "int64")
    shape, biases_shape = (tokens, p.channels), (p.window, p.channels)

    @T.prim_func
    def compress_windows(
        kv_a: T.StridedTensor[shape, (rows[0], 1), dtype],
        z_a: T.StridedTensor[shape, (rows[1], 1), dtype],
        bias_a: T.StridedTensor[biases_shape, (bias_rows[0], 1), T.float32],
        kv_b: T.StridedTensor[shape, (rows[2], 1), dtype],
        z_b: T.StridedTensor[shape, (rows[3], 1), dtype],
        bias_b: T.StridedTensor[biases_shape, (bias_rows[1], 1), T.float32],
        places: T.Tensor[(num_windows, 3), T.int32],
        out: T.Tensor[(num_windows, p.channels), p.out_dtype],
    ):
        with T.Kernel(
            T.min(T.ceildiv(num_windows, geo.slots), p.workers),
            geo.blocks_across,
            threads=geo.threads,
            prelude=PRELUDE,
        ) as (block, across):
            T.annotate_min_blocks_per_sm(blocks_per_sm(geo))
            assume_multiples(p.vector, rows[: 2 * p.series])
            assume_multiples(geo.part, bias_rows[: p.series])
            walked(block, across, num_windows, kv_a, z_a, bias_a, kv_b, z_b, bias_b, places, out)

    return compress_windows


# ---- where windows lie --------------------------------------------------------------------------

WARP = 32
PLACING_THREADS = 128


class PlacesPlan(NamedTuple):
    window: int


@kernel(plan=as_given(PlacesPlan), access_bits=lambda *_: (32, 32), pass_configs=PASS_CONFIGS)
def place_windows(window: int) -> Any:
    """Where the windows of sequences lie, from the sequences' ends.

    The first kernel, one warp, makes the bounds increase inside `0..tokens` and counts windows; in
    the second a thread looks up its window's sequence. `counted[b]` windows are before sequence
    `b`. Of a window `places` has its first row, that of the window before, and its position in its
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
        places: T.Tensor[(num_windows, 3), T.int32],
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
            place = T.alloc_var(T.int32)
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
                    place = at - counted[low - 1]
                    first[2] = place * window
                    first[0] = bounds[low - 1] + first[2]
                    if place > 0:
                        first[1] = first[0] - window
                for i in T.unroll(3):
                    places[at, i] = first[i]

    return placed_windows
