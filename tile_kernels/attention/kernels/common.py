"""Device macros of the compression: a window's softmax, over the threads that share it."""

from collections.abc import Callable
from typing import Any, TypeVar

from tilelang import language as T

from tile_kernels.attention.geometry import Geometry
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, near_reciprocal

LOG2E = 1.4426950408889634
# Every barrier is written out: threads share memory only where windows span groups of them.
PASS_CONFIGS = {**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True}

P = TypeVar("P", bound=tuple[Any, ...])


def bits_of(dtype: str) -> int:
    """The width of one number."""
    return 16 if dtype == "bfloat16" else 32


def as_given(plan: Callable[..., P]) -> Callable[..., P]:
    """A plan that is the problem itself, on any device."""
    return lambda *problem: plan(*problem[:-1])


def assume_multiples(unit: int, strides: tuple[Any, ...]) -> None:
    """In a kernel: a promise that `strides` are multiples of `unit`."""
    for stride in strides:
        T.evaluate(T.assume(stride % unit == 0))


def window_rows(geo: Geometry, ragged: bool) -> Any:
    """A macro: the first row of a window and of the one before it, -1 where there is none."""

    @T.macro
    def found(places, window, num_windows, first):
        first[0] = -1
        first[1] = -1
        if window < num_windows:
            if ragged:
                first[0] = places[window, 0]
                first[1] = places[window, 1]
            else:
                first[0] = window * geo.window
                first[1] = (window - 1) * geo.window  # negative before the first window

    return found


def each_series(geo: Geometry, move: Any) -> Any:
    """The macro `move` for a thread's rows of values and scores of each series, from `item` on."""

    def moved(kv_a, z_a, kv_b, z_b, first, item, channel, kv, z):
        move(kv_a, first[0], item, channel, 0, kv)
        move(z_a, first[0], item, channel, 0, z)
        if geo.series == 2:
            move(kv_b, first[1], item, channel, geo.items, kv)
            move(z_b, first[1], item, channel, geo.items, z)

    return moved


def row_loader(geo: Geometry, dtype: str) -> Any:
    """A macro: a thread's rows to registers, as `each_series` does; zeros where there are none."""

    @T.macro
    def load(source, first, item, channel, at, held):
        if first < 0 or not geo.exact:
            for v in T.unroll(geo.items * geo.vector):
                held[at * geo.vector + v] = T.cast(T.float32(0), dtype)
        if first >= 0:
            for r in T.unroll(geo.items):
                if geo.exact or item + r < geo.window:
                    for v in T.vectorized(geo.vector):
                        held[(at + r) * geo.vector + v] = source[first + item + r, channel + v]

    return each_series(geo, load)


def thread_place(geo: Geometry, across: Any) -> tuple[Any, Any, Any, Any]:
    """In a kernel: a thread's lane, group and slot, and its first channel."""
    tx = T.get_thread_binding()
    lane = tx % geo.lanes
    group = tx // geo.lanes % geo.groups
    return lane, group, tx // (geo.lanes * geo.groups), across * geo.width + lane * geo.vector


def shared_memory(geo: Geometry) -> tuple[Any, Any, Any]:
    """In a kernel: room for biases, for the sums of groups and for those of windows."""
    staged = (geo.series, geo.groups * geo.items, geo.parts, geo.lanes * geo.part)
    exchange = (1, 1, 1) if geo.groups == 1 else (3, geo.groups, geo.slots * geo.width)
    return (
        T.alloc_shared(staged if geo.chunks == 1 else (1, 1, 1, 1), T.float32),
        T.alloc_shared(exchange, T.float32),
        T.alloc_shared((3, exchange[2]), T.float32),
    )


def registers(geo: Geometry, dtype: str) -> tuple[Any, ...]:
    """In a kernel: what a thread holds of its rows and of their sums."""
    return (
        T.alloc_local((geo.rows * geo.vector,), dtype),  # values
        T.alloc_local((geo.rows * geo.vector,), dtype),  # scores
        T.alloc_local((geo.rows * geo.part,), T.float32),  # scores of a part of the channels
        T.alloc_local((geo.vector,), T.float32),  # maxima
        T.alloc_local((geo.vector,), T.float32),  # sums
        T.alloc_local((geo.vector,), T.float32),  # weighted sums
        T.alloc_local((2,), T.int32),  # the first rows of the window and of the one before it
    )


def bias_stage(geo: Geometry) -> Any:
    """A macro: a block's biases to shared memory, in units of the binary logarithm.

    The threads of the first slot bring what they themselves and those of other slots need.
    """

    @T.macro
    def staged(bias, series, slot, group, lane, channel, biases):
        read = T.alloc_local((geo.part,), T.float32)
        if slot == 0 and channel < geo.channels:
            for r in T.unroll(geo.items):
                item = group * geo.items + r
                if geo.exact or item < geo.window:
                    for q in T.unroll(geo.parts):
                        for e in T.vectorized(geo.part):
                            read[e] = bias[item, channel + q * geo.part + e]
                        for e in T.unroll(geo.part):
                            read[e] = T.ieee_mul(read[e], T.float32(LOG2E))
                        for e in T.vectorized(geo.part):
                            biases[series, item, q, lane * geo.part + e] = read[e]

    return staged


def part_scores(geo: Geometry) -> Any:
    """A macro: the scores of a thread's rows for one part of its channels, -inf without a row.

    Biases come from shared memory, or straight from their tensors where windows take chunks.
    """

    @T.macro
    def bias_of(bias, biases, series, item, q, lane, channel, read):
        if geo.chunks == 1:
            for e in T.vectorized(geo.part):
                read[e] = biases[series, item, q, lane * geo.part + e]
        elif item < geo.window:
            for e in T.vectorized(geo.part):
                read[e] = bias[item, channel + q * geo.part + e]
            for e in T.unroll(geo.part):
                read[e] = T.ieee_mul(read[e], T.float32(LOG2E))

    @T.macro
    def scored(first, item, lane, channel, q, z, bias_a, bias_b, biases, scores):
        read = T.alloc_local((geo.part,), T.float32)
        for s in T.unroll(geo.series):
            for r in T.unroll(geo.items):
                if s == 0:
                    bias_of(bias_a, biases, 0, item + r, q, lane, channel, read)
                else:
                    bias_of(bias_b, biases, 1, item + r, q, lane, channel, read)
                for e in T.unroll(geo.part):
                    at = s * geo.items + r
                    scores[at * geo.part + e] = T.Select(
                        first[s] >= 0 and (geo.exact or item + r < geo.window),
                        T.ieee_fmaf(
                            T.cast(z[at * geo.vector + q * geo.part + e], T.float32),
                            T.float32(LOG2E),
                            read[e],
                        ),
                        -T.infinity(T.float32),
                    )

    return scored


@T.macro
def above(top):
    """What to subtract from scores up to `top`, which may be -inf."""
    return T.Select(top == -T.infinity(T.float32), T.float32(0), top)


def part_sums(geo: Geometry) -> Any:
    """A macro: fold a thread's rows into its running maximum, sum and weighted sum.

    `scores` are of one part of the channels, and become the terms of the sum.
    """

    @T.macro
    def folded(q, kv, scores, tops, totals, sums):
        for e in T.unroll(geo.part):
            at = q * geo.part + e
            before = T.alloc_var(T.float32, init=tops[at])
            top = T.alloc_var(T.float32, init=tops[at])
            for i in T.unroll(geo.rows):
                top = T.max(top, scores[i * geo.part + e])
            tops[at] = top
            top = above(top)
            if geo.chunks > 1:
                factor = T.alloc_var(T.float32, init=T.exp2(T.ieee_sub(before, top)))
                totals[at] = T.ieee_mul(totals[at], factor)
                sums[at] = T.ieee_mul(sums[at], factor)
            for i in T.unroll(geo.rows):
                term = T.alloc_var(
                    T.float32, init=T.exp2(T.ieee_sub(scores[i * geo.part + e], top))
                )
                scores[i * geo.part + e] = term
                totals[at] = T.ieee_add(totals[at], term)
                sums[at] = T.ieee_fmaf(term, T.cast(kv[i * geo.vector + at], T.float32), sums[at])

    return folded


@T.macro
def quotients(total, total_inverse, entry):
    """In place: `1 / total` and `entry / total`, both 0 where no row had a score."""
    total_inverse[0] = near_reciprocal(total)
    entry[0] = T.ieee_mul(entry[0], total_inverse[0])
    if total == T.float32(0):
        total_inverse[0] = T.float32(0)
        entry[0] = T.float32(0)


def over_groups(geo: Geometry) -> Any:
    """A macro: from the sums of groups to a window's own, by way of shared memory.

    Afterwards `tops` hold the maxima, `totals` the inverse sums and `sums` the entries. Groups are
    taken in their order. All threads of a block call it: it is a barrier.
    """
    positions = geo.slots * geo.parts * geo.lanes * geo.part

    @T.macro
    def alone(slot, group, lane, tops, totals, sums, of_groups, of_window):
        inverse = T.alloc_local((1,), T.float32)
        entry = T.alloc_local((1,), T.float32)
        for v in T.unroll(geo.vector):
            entry[0] = sums[v]
            quotients(totals[v], inverse, entry)
            totals[v] = inverse[0]
            sums[v] = entry[0]

    @T.macro
    def together(slot, group, lane, tops, totals, sums, of_groups, of_window):
        tx = T.get_thread_binding()
        inverse = T.alloc_local((1,), T.float32)
        entry = T.alloc_local((1,), T.float32)
        # As the result has them: slot, part, channel of the part.
        place = (slot * geo.parts * geo.lanes + lane) * geo.part
        for q in T.unroll(geo.parts):
            for e in T.vectorized(geo.part):
                of_groups[0, group, place + q * geo.lanes * geo.part + e] = tops[q * geo.part + e]
            for e in T.vectorized(geo.part):
                of_groups[1, group, place + q * geo.lanes * geo.part + e] = totals[q * geo.part + e]
            for e in T.vectorized(geo.part):
                of_groups[2, group, place + q * geo.lanes * geo.part + e] = sums[q * geo.part + e]
        T.sync_threads()
        for turn in T.unroll(-(-positions // geo.threads)):
            at = turn * geo.threads + tx
            if at < positions:
                top = T.alloc_var(T.float32, init=of_groups[0, 0, at])
                for g in T.unroll(geo.groups - 1):
                    top = T.max(top, of_groups[0, g + 1, at])
                of_window[0, at] = top
                top = above(top)
                total = T.alloc_var(T.float32, init=T.float32(0))
                entry[0] = T.float32(0)
                for g in T.unroll(geo.groups):
                    factor = T.alloc_var(
                        T.float32, init=T.exp2(T.ieee_sub(of_groups[0, g, at], top))
                    )
                    total = T.ieee_fmaf(factor, of_groups[1, g, at], total)
                    entry[0] = T.ieee_fmaf(factor, of_groups[2, g, at], entry[0])
                quotients(total, inverse, entry)
                of_window[1, at] = inverse[0]
                of_window[2, at] = entry[0]
        T.sync_threads()
        for q in T.unroll(geo.parts):
            for e in T.vectorized(geo.part):
                tops[q * geo.part + e] = of_window[0, place + q * geo.lanes * geo.part + e]
            for e in T.vectorized(geo.part):
                totals[q * geo.part + e] = of_window[1, place + q * geo.lanes * geo.part + e]
            for e in T.vectorized(geo.part):
                sums[q * geo.part + e] = of_window[2, place + q * geo.lanes * geo.part + e]

    return alone if geo.groups == 1 else together
