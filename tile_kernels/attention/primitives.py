"""Device macros of the compression: a window's softmax, over the threads that share it."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.geometry import Geometry, WindowPlan, shared_shapes
from tile_kernels.runtime.kernels.common import (
    EXPLICIT_GUARDS,
    await_stages,
    close_stage,
    free_stage,
    near_reciprocal,
    stage,
)

LOG2E = 1.4426950408889634
# For kernels that use `exp2_flushed`. PyTorch's and CUDA's `exp2f` spends four instructions on
# results below 2**-126, which are as good as the zero that the special function unit makes of them.
PRELUDE = """
#ifdef __CUDACC__
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
inline float exp2_flushed(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}
#endif
"""
# Every barrier is written out: threads share memory only where windows span groups of them.
PASS_CONFIGS = {**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True}


def exp2_flushed(x: Any) -> Any:
    """`2**x`, and 0 where that is below 2**-126; of kernels with `PRELUDE`."""
    return T.call_extern(T.float32, "exp2_flushed", x)


def assume_multiples(unit: int, strides: tuple[Any, ...]) -> None:
    """In a kernel: a promise that `strides` are multiples of `unit`."""
    for stride in strides:
        T.evaluate(T.assume(stride % unit == 0))


class SeriesTypes(NamedTuple):
    """Types of the parameters that hold values, scores and biases of both series.

    Rows are those of `kv_a`, `z_a`, `kv_b` and `z_b`; `strides` and `bias_strides` are how far
    apart they are, and those of the biases.
    """

    plan: Any
    tokens: Any
    strides: tuple[Any, ...]
    bias_strides: tuple[Any, ...]

    def rows(self, i: int) -> Any:
        """Values or scores, one of four."""
        shape = (self.tokens, self.plan.channels)
        return T.StridedTensor[shape, (self.strides[i], 1), self.plan.dtype]

    def biases(self, i: int) -> Any:
        """Of series a or b."""
        shape = (self.plan.window, self.plan.channels)
        return T.StridedTensor[shape, (self.bias_strides[i], 1), T.float32]

    def assume_rows(self) -> None:
        """In a kernel: a promise that accesses to rows are aligned."""
        assume_multiples(self.plan.vector, self.strides[: 2 * self.plan.series])

    def assume_biases(self) -> None:
        """In a kernel: a promise that accesses to biases are aligned."""
        assume_multiples(min(self.plan.vector, 4), self.bias_strides[: self.plan.series])


def series_types(plan: Any, tokens: Any, prefix: str = "") -> SeriesTypes:
    """For a plan with channels, a window, series, a dtype and a vector."""

    def strides(*names: str) -> tuple[Any, ...]:
        return T.dynamic(" ".join(f"{prefix}{name}_row" for name in names), "int64")

    return SeriesTypes(
        plan, tokens, strides("kv_a", "z_a", "kv_b", "z_b"), strides("bias_a", "bias_b")
    )


def window_rows(geo: Geometry, ragged: bool) -> Any:
    """A macro: the first row of a window and of the one before it, -1 where there is none."""

    @T.macro
    def found(starts, window, num_windows, first):
        first[0] = -1
        first[1] = -1
        if window < num_windows:
            if ragged:
                first[0] = starts[window, 0]
                first[1] = starts[window, 1]
            else:
                first[0] = window * geo.window
                first[1] = (window - 1) * geo.window  # negative before the first window

    return found


def each_row(geo: Geometry, move: Any) -> Any:
    """A macro: `move` for each of a thread's rows of one tensor, from `item` on.

    `move` gets the tensor, the row and the channel there, and the row's number in `regs`.
    """

    @T.macro
    def moved(tensor, first, item, channel, at, regs):
        if first >= 0:
            for r in T.unroll(geo.items):
                if geo.exact or item + r < geo.window:
                    move(tensor, first + item + r, channel, at + r, regs)

    return moved


def each_series(geo: Geometry, move: Any) -> Any:
    """The macro `move` for a thread's rows of values and scores of each series, from `item` on."""

    def moved(kv_a, z_a, kv_b, z_b, first, item, channel, kv, z):
        move(kv_a, first[0], item, channel, 0, kv)
        move(z_a, first[0], item, channel, 0, z)
        if geo.series == 2:
            move(kv_b, first[1], item, channel, geo.items, kv)
            move(z_b, first[1], item, channel, geo.items, z)

    return moved


def row_loader(geo: Geometry, dtype: str, ahead: bool = False) -> Any:
    """A macro: a thread's rows to registers, as `each_series` does; zeros where there are none.

    `ahead`: from shared memory, where they were copied before (see `row_stager`).
    """

    @T.macro
    def load_row(source, row, channel, at, regs):
        for v in T.vectorized(geo.vector):
            if ahead:
                regs[at * geo.vector + v] = source[at, T.get_thread_binding(), v]
            else:
                regs[at * geo.vector + v] = source[row, channel + v]

    load_rows = each_row(geo, load_row)

    @T.macro
    def load(source, first, item, channel, at, regs):
        if first < 0 or not geo.exact:
            for v in T.unroll(geo.items * geo.vector):
                regs[at * geo.vector + v] = T.cast(T.float32(0), dtype)
        load_rows(source, first, item, channel, at, regs)

    return each_series(geo, load)


def row_stager(geo: Geometry) -> Any:
    """A macro: start copies of a thread's rows to its part of shared memory, as `each_series`."""

    @T.macro
    def start(source, row, channel, at, staged):
        stage(staged[at, T.get_thread_binding(), 0], source[row, channel], geo.vector)

    return each_series(geo, each_row(geo, start))


def rows_ahead(geo: Geometry, dtype: str, ragged: bool) -> Any:
    """Macros: `begin` with copies of a thread's rows of its first window; `advance`, the rows of a
    window to registers and copies of those of the next one.

    `first` and `coming` are where these two windows and the ones before them begin.
    """
    found, load, start = window_rows(geo, ragged), row_loader(geo, dtype, True), row_stager(geo)

    @T.macro
    def begin(
        window, num_windows, starts, kv_a, z_a, kv_b, z_b, group, channel, kv_staged, z_staged,
        coming,
    ):  # fmt: skip
        found(starts, window, num_windows, coming)
        if channel < geo.channels:
            start(kv_a, z_a, kv_b, z_b, coming, group * geo.items, channel, kv_staged, z_staged)
        close_stage()

    @T.macro
    def advance(
        following, num_windows, starts, kv_a, z_a, kv_b, z_b, group, channel, kv_staged, z_staged,
        first, coming, kv, z,
    ):  # fmt: skip
        for s in T.unroll(2):
            first[s] = coming[s]
        await_stages(0)
        if channel < geo.channels:
            load(kv_staged, z_staged, kv_staged, z_staged, first, group * geo.items, channel, kv, z)
        free_stage()
        begin(
            following, num_windows, starts, kv_a, z_a, kv_b, z_b, group, channel, kv_staged,
            z_staged, coming,
        )  # fmt: skip

    return begin, advance


def thread_place(geo: Geometry, across: Any) -> tuple[Any, Any, Any, Any]:
    """In a kernel: a thread's lane, group and slot, and its first channel."""
    tx = T.get_thread_binding()
    lane = tx % geo.lanes
    group = tx // geo.lanes % geo.groups
    return lane, group, tx // (geo.lanes * geo.groups), across * geo.width + lane * geo.vector


def shared_memory(geo: Geometry) -> tuple[Any, ...]:
    """In a kernel: room for biases, for the sums of groups and for those of windows."""
    return tuple(T.alloc_shared(shape, T.float32) for shape in shared_shapes(geo))


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
        T.alloc_local((2,), T.int32),  # the same of the next window
    )


# ---- copies of the next window's rows -----------------------------------------------------------


def places_ahead(geo: Geometry, dtype: str, ahead: bool) -> tuple[Any, Any]:
    """In a kernel: room for values and scores of one window."""
    shape = (geo.rows, geo.threads, geo.vector) if ahead else (1, 1, 1)
    return T.alloc_shared(shape, dtype), T.alloc_shared(shape, dtype)


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


def where_here(geo: Geometry, s: int, first: Any, item: Any, value: Any, other: Any) -> Any:
    """`value` where series `s` has a row at `item` of the window.

    Only windows that take chunks are asked for where there is none.
    """
    if not geo.exact:
        value = T.Select(item < geo.window, value, other)
    return value if s == 0 and geo.chunks == 1 else T.Select(first[s] >= 0, value, other)


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
        for s in range(geo.series):
            for r in T.unroll(geo.items):
                if s == 0:
                    bias_of(bias_a, biases, 0, item + r, q, lane, channel, read)
                else:
                    bias_of(bias_b, biases, 1, item + r, q, lane, channel, read)
                for e in T.unroll(geo.part):
                    at = s * geo.items + r
                    scores[at * geo.part + e] = where_here(
                        geo, s, first, item + r,
                        T.ieee_fmaf(
                            T.cast(z[at * geo.vector + q * geo.part + e], T.float32),
                            T.float32(LOG2E),
                            read[e],
                        ),
                        -T.infinity(T.float32),
                    )  # fmt: skip

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
                factor = T.alloc_var(T.float32, init=exp2_flushed(T.ieee_sub(before, top)))
                totals[at] = T.ieee_mul(totals[at], factor)
                sums[at] = T.ieee_mul(sums[at], factor)
            for i in T.unroll(geo.rows):
                term = T.alloc_var(
                    T.float32, init=exp2_flushed(T.ieee_sub(scores[i * geo.part + e], top))
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


def part_quotients(geo: Geometry) -> Any:
    """A macro: of one part of the channels, `totals` become their inverses and `sums` entries."""

    @T.macro
    def divided(q, totals, sums):
        inverse = T.alloc_local((1,), T.float32)
        entry = T.alloc_local((1,), T.float32)
        for e in T.unroll(geo.part):
            at = q * geo.part + e
            entry[0] = sums[at]
            quotients(totals[at], inverse, entry)
            totals[at] = inverse[0]
            sums[at] = entry[0]

    return divided


def over_groups(geo: Geometry) -> Any:
    """A macro: from the sums of groups to a window's own, through shared memory.

    Afterwards `tops` hold the maxima, `totals` the inverse sums and `sums` the entries. Groups are
    taken in their order. All threads of a block call it: it is a barrier.
    """
    positions = geo.slots * geo.parts * geo.lanes * geo.part
    divided = part_quotients(geo)

    @T.macro
    def alone(slot, group, lane, tops, totals, sums, group_sums, window_sums):
        for q in T.unroll(geo.parts):
            divided(q, totals, sums)

    @T.macro
    def together(slot, group, lane, tops, totals, sums, group_sums, window_sums):
        tx = T.get_thread_binding()
        inverse = T.alloc_local((1,), T.float32)
        entry = T.alloc_local((1,), T.float32)
        # As the result has them: slot, part, channel of the part.
        base = (slot * geo.parts * geo.lanes + lane) * geo.part
        for q in T.unroll(geo.parts):
            for e in T.vectorized(geo.part):
                group_sums[0, group, base + q * geo.lanes * geo.part + e] = tops[q * geo.part + e]
            for e in T.vectorized(geo.part):
                group_sums[1, group, base + q * geo.lanes * geo.part + e] = totals[q * geo.part + e]
            for e in T.vectorized(geo.part):
                group_sums[2, group, base + q * geo.lanes * geo.part + e] = sums[q * geo.part + e]
        T.sync_threads()
        for step in T.unroll(-(-positions // geo.threads)):
            at = step * geo.threads + tx
            if at < positions:
                top = T.alloc_var(T.float32, init=group_sums[0, 0, at])
                for g in T.unroll(geo.groups - 1):
                    top = T.max(top, group_sums[0, g + 1, at])
                window_sums[0, at] = top
                top = above(top)
                total = T.alloc_var(T.float32, init=T.float32(0))
                entry[0] = T.float32(0)
                for g in T.unroll(geo.groups):
                    factor = T.alloc_var(
                        T.float32, init=exp2_flushed(T.ieee_sub(group_sums[0, g, at], top))
                    )
                    total = T.ieee_fmaf(factor, group_sums[1, g, at], total)
                    entry[0] = T.ieee_fmaf(factor, group_sums[2, g, at], entry[0])
                quotients(total, inverse, entry)
                window_sums[1, at] = inverse[0]
                window_sums[2, at] = entry[0]
        T.sync_threads()
        for q in T.unroll(geo.parts):
            for e in T.vectorized(geo.part):
                tops[q * geo.part + e] = window_sums[0, base + q * geo.lanes * geo.part + e]
            for e in T.vectorized(geo.part):
                totals[q * geo.part + e] = window_sums[1, base + q * geo.lanes * geo.part + e]
            for e in T.vectorized(geo.part):
                sums[q * geo.part + e] = window_sums[2, base + q * geo.lanes * geo.part + e]

    return alone if geo.groups == 1 else together


# ---- the walk over windows -----------------------------------------------------------------------


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


def window_walk(p: WindowPlan, finish: Any) -> Any:
    """A macro: a block walks over its windows and calls `finish` with the entry of each.

    All threads call `finish` together. `results` is whatever `finish` needs from the caller.
    """
    geo, dtype = p.geometry, p.dtype
    found, staged = window_rows(geo, p.ragged), bias_stage(geo)
    summed, joined = thread_sums(geo, dtype, p.ahead), over_groups(geo)
    begin_rows, turn_rows = rows_ahead(geo, dtype, p.ragged)

    @T.macro
    def walked(
        block, across, num_windows, kv_a, z_a, bias_a, kv_b, z_b, bias_b, starts, results
    ):  # fmt: skip
        lane, group, slot, channel = thread_place(geo, across)
        biases, group_sums, window_sums = shared_memory(geo)
        kv, z, scores, tops, totals, sums, first, coming = registers(geo, dtype)
        kv_staged, z_staged = places_ahead(geo, dtype, p.ahead)
        workers = T.min(T.ceildiv(num_windows, geo.slots), p.workers)
        if p.ahead:
            begin_rows(
                block * geo.slots + slot, num_windows, starts, kv_a, z_a, kv_b, z_b, group, channel,
                kv_staged, z_staged, coming,
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
                    window + workers * geo.slots, num_windows, starts, kv_a, z_a, kv_b, z_b, group,
                    channel, kv_staged, z_staged, first, coming, kv, z,
                )  # fmt: skip
            else:
                found(starts, window, num_windows, first)
            summed(
                kv_a, z_a, bias_a, kv_b, z_b, bias_b, biases, first, group, lane, channel,
                kv, z, scores, tops, totals, sums,
            )  # fmt: skip
            joined(slot, group, lane, tops, totals, sums, group_sums, window_sums)
            finish(window, num_windows, slot, group, lane, channel, sums, starts, results)

    return walked
