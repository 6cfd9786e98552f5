"""What follows the compression in inference: norm, rotation, and the cast to e4m3."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.geometry import bits_of, blocks_per_sm
from tile_kernels.attention.norm_rope.plan import GROUP, FusedPlan, RowsPlan
from tile_kernels.attention.primitives import PASS_CONFIGS, PRELUDE, series_types, window_walk
from tile_kernels.quant.primitives import CLAMP_MIN, encode_and_store, group_amax, scale_of
from tile_kernels.runtime.kernels.common import WARP
from tile_kernels.runtime.launch import kernel

THREADS = 256


class TailTypes(NamedTuple):
    """Types of the parameters of both kernels, beside what they read."""

    starts: Any
    weight: Any
    cos: Any
    sin: Any
    data: Any
    sf: Any
    turned: Any


def tail_types(p: FusedPlan | RowsPlan, num_windows: Any, positions: Any) -> TailTypes:
    """The types for `num_windows` rows, and for tables of `positions`."""
    plain = p.channels - p.rotated
    return TailTypes(
        T.Tensor[(num_windows, 3), T.int32],
        T.Tensor[(p.channels,), T.float32],
        T.Tensor[(positions, p.rotated // 2), T.float32],
        T.Tensor[(positions, p.rotated // 2), T.float32],
        T.Tensor[(num_windows, plain), T.float8_e4m3fn],
        T.Tensor[(num_windows, plain // GROUP), T.float32],
        T.Tensor[(num_windows, p.rotated), T.bfloat16],
    )


def row_tail(p: FusedPlan | RowsPlan, lanes: int) -> Any:
    """A macro: a row of all channels, some in each of `lanes` threads, to its results.

    `lanes` is a power of two; all threads of a block call it, it is a barrier for rows of more than
    a warp. `warp_sums` is shared memory, `(slots, warps)`.
    """
    channels, vector = p.channels, p.vector
    plain = channels - p.rotated
    warps = max(1, lanes // WARP)
    amax_of, scaled = group_amax(vector, GROUP), scale_of("e4m3", True)
    encode = encode_and_store("e4m3", plain, vector, vector)

    @T.macro
    def summed(slot, lane, values, warp_sums, total):
        total[0] = T.float32(0)
        for v in T.unroll(vector):
            total[0] = T.ieee_fmaf(values[v], values[v], total[0])
        for d in T.unroll(min(lanes, WARP).bit_length() - 1):
            total[0] = T.ieee_add(total[0], T.shfl_xor(total[0], T.shift_left(1, d)))
        if warps > 1:
            if lane % WARP == 0:
                warp_sums[slot, lane // WARP] = total[0]
            T.sync_threads()
            total[0] = warp_sums[slot, 0]
            for w in T.unroll(warps - 1):
                total[0] = T.ieee_add(total[0], warp_sums[slot, w + 1])
            T.sync_threads()

    @T.macro
    def rotate(values, position, pair, cos, sin):
        for i in T.unroll(vector // 2):
            c = T.alloc_var(T.float32, init=cos[position, pair + i])
            s = T.alloc_var(T.float32, init=sin[position, pair + i])
            left = T.alloc_var(T.float32, init=values[2 * i])
            right = T.alloc_var(T.float32, init=values[2 * i + 1])
            values[2 * i] = T.ieee_sub(T.ieee_mul(left, c), T.ieee_mul(right, s))
            values[2 * i + 1] = T.ieee_add(T.ieee_mul(left, s), T.ieee_mul(right, c))

    @T.macro
    def finished(
        at, num_windows, slot, lane, values, starts, warp_sums,
        weight, cos, sin, data, sf, turned, eps,
    ):  # fmt: skip
        channel = lane * vector
        total = T.alloc_local((1,), T.float32)
        scale = T.alloc_local((2,), T.float32)
        inverse = T.alloc_local((1,), T.float32)
        weights = T.alloc_local((vector,), T.float32)
        written = T.alloc_local((vector,), T.bfloat16)
        position = T.alloc_var(T.int32, init=0)
        for v in T.unroll(vector):
            weights[v] = T.float32(0)
        if channel < channels:
            for v in T.vectorized(vector):
                weights[v] = weight[channel + v]
        summed(slot, lane, values, warp_sums, total)
        factor = T.alloc_var(
            T.float32,
            init=T.rsqrt(T.ieee_fmaf(total[0], T.float32(1 / channels), eps)),
        )
        for v in T.unroll(vector):
            values[v] = T.ieee_mul(T.ieee_mul(values[v], factor), weights[v])
        scaled(amax_of(values, 0), T.float32(CLAMP_MIN["e4m3"]), scale)
        inverse[0] = scale[1]
        if at < num_windows:
            if channel < plain:
                if lane % (GROUP // vector) == 0:
                    sf[at, channel // GROUP] = scale[0]
                encode(values, 0, inverse, vector, data, at, channel)
            elif channel < channels:
                position = at * p.window
                if p.ragged:
                    position = T.max(starts[at, 2], 0)
                position = T.min(position, cos.shape[0] - 1)
                rotate(values, position, (channel - plain) // 2, cos, sin)
                for v in T.unroll(vector):
                    written[v] = T.cast(values[v], T.bfloat16)
                for v in T.vectorized(vector):
                    turned[at, channel - plain + v] = written[v]

    return finished


# ---- in one pass with the compression -----------------------------------------------------------


def fused_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    p = FusedPlan(*static)
    loads = {p.vector * bits_of(p.dtype), 32 * min(p.vector, 4), 32}
    return tuple(sorted(loads)), tuple(sorted({8 * p.vector, 16 * p.vector, 32}))


@kernel(access_bits=fused_access_bits, pass_configs=PASS_CONFIGS)
def compress_tail(*static: Any) -> Any:
    """For windows that one thread holds, of rows that one block holds."""
    p = FusedPlan(*static)
    geo = p.compress.geometry
    tail = row_tail(p, geo.lanes)
    tokens, num_windows, positions = T.dynamic("tokens num_windows positions")
    given, types = series_types(p, tokens), tail_types(p, num_windows, positions)

    @T.macro
    def finish(at, num_windows, slot, group, lane, channel, entry, starts, results):
        tail(at, num_windows, slot, lane, entry, starts, *results)

    walked = window_walk(p.compress, finish)

    @T.prim_func
    def compress_norm_rope_cast(
        kv_a: given.rows(0), z_a: given.rows(1), bias_a: given.biases(0),
        kv_b: given.rows(2), z_b: given.rows(3), bias_b: given.biases(1),
        starts: types.starts, weight: types.weight, cos: types.cos, sin: types.sin,
        data: types.data, sf: types.sf, turned: types.turned, eps: T.float32,
    ):  # fmt: skip
        with T.Kernel(
            T.min(T.ceildiv(num_windows, geo.slots), p.workers),
            threads=geo.threads,
            prelude=PRELUDE,
        ) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm(geo))
            given.assume_rows()
            given.assume_biases()
            warp_sums = T.alloc_shared((geo.slots, max(1, geo.lanes // WARP)), T.float32)
            walked(
                block, 0, num_windows, kv_a, z_a, bias_a, kv_b, z_b, bias_b, starts,
                (warp_sums, weight, cos, sin, data, sf, turned, eps),
            )  # fmt: skip

    return compress_norm_rope_cast


# ---- of entries in memory -----------------------------------------------------------------------


def rows_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    p = RowsPlan(*static)
    loads = {32 * min(p.vector, 4), 32}
    return tuple(sorted(loads)), tuple(sorted({8 * p.vector, 16 * p.vector, 32}))


@kernel(access_bits=rows_access_bits, pass_configs=PASS_CONFIGS)
def norm_rope_cast(*static: Any) -> Any:
    """A row of `lanes` threads."""
    p = RowsPlan(*static)
    lanes = p.lanes
    slots = max(1, THREADS // lanes)
    tail = row_tail(p, lanes)
    num_windows, positions = T.dynamic("num_windows positions")
    types = tail_types(p, num_windows, positions)

    @T.prim_func
    def norm_rope_cast_rows(
        entries: T.Tensor[(num_windows, p.channels), T.float32],
        starts: types.starts, weight: types.weight, cos: types.cos, sin: types.sin,
        data: types.data, sf: types.sf, turned: types.turned, eps: T.float32,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(num_windows, slots), threads=slots * lanes) as block:
            lane = T.get_thread_binding() % lanes
            slot = T.get_thread_binding() // lanes
            at = block * slots + slot
            values = T.alloc_local((p.vector,), T.float32)
            warp_sums = T.alloc_shared((slots, max(1, lanes // WARP)), T.float32)
            for v in T.unroll(p.vector):
                values[v] = T.float32(0)
            if at < num_windows and lane * p.vector < p.channels:
                for v in T.vectorized(p.vector):
                    values[v] = entries[at, lane * p.vector + v]
            tail(
                at, num_windows, slot, lane, values, starts, warp_sums,
                weight, cos, sin, data, sf, turned, eps,
            )  # fmt: skip

    return norm_rope_cast_rows
