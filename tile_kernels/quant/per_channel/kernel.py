"""Casts with a scale for every few rows of a channel: gathered, of SwiGLU, transposed or not."""

import math
from typing import Any

from tilelang import language as T

from tile_kernels.quant.per_channel.plan import (
    ACCESS_BYTES,
    CLAMPED_SWIGLU,
    NONE,
    SWIGLU,
    TILE_ROWS,
    Plan,
)
from tile_kernels.quant.primitives import high_half, low_half, read_scale, scale_of
from tile_kernels.quant.storage import BITS, LANES, storage
from tile_kernels.quant.swiglu.primitives import NEAR, near_swiglu, swiglu_clamp, swiglu_value
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

BANK_BYTES = 128
MAX_UNROLLED = 16  # steps of a loop that is unrolled; not measured
AHEAD = 4  # rows whose halves a thread loads before it activates them


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    loads, stores = {plan.load * BITS[plan.source]}, {8 * plan.store, 32}
    if plan.gathered or plan.source == "e4m3":
        loads.add(32)
    return tuple(sorted(loads)), tuple(sorted(stores))


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_columns(*static: Any) -> Any:
    """A block takes 128 rows of some channels: every value is read once and stays in registers.

    Each thread finds the largest magnitudes of its rows, they meet in shared memory, and there
    every channel (by fours for scales of 32 rows) gets its scale.

    To transpose, a thread has 4 or 8 bytes of each of its channels. In the transposed tile, of 128
    bytes per channel, 16-byte chunk `c` of channel `j` is kept at chunk `c ^ (j // chunk % 8)`.
    The 8 threads along a row and 4 along a column that are a warp, or 8 and 2 of them, then write
    all banks at once, and 8 threads read back all of a channel.
    """
    plan = Plan(*static)
    chunk, rows_per_thread, across, lanes = (
        plan.chunk,
        plan.rows_per_thread,
        plan.across,
        plan.lanes,
    )
    load, store, group = plan.load, plan.store, plan.group
    tile_rows, columns = TILE_ROWS, across * chunk
    row_groups = tile_rows // rows_per_thread
    threads = across * row_groups
    scale_rows = tile_rows // group
    per_scale = row_groups // scale_rows
    scaled = plan.source == "e4m3"
    activated = plan.activation != NONE
    dtype = storage(plan.source)[0]
    kept_dtype = "bfloat16" if activated else dtype
    paired = kept_dtype == "bfloat16"
    out_dtype = storage("e4m3")[0]
    scale_steps = -(-scale_rows * columns // threads)
    make_scale = scale_of("e4m3", plan.round_sf)
    near_value = near_swiglu(1 if (plan.source, plan.activation) == ("bfloat16", SWIGLU) else 2)
    slots = ACCESS_BYTES
    chunks = BANK_BYTES // slots
    out_lanes = tile_rows // store
    out_steps = columns * out_lanes // threads
    halves = 2 if activated else 1

    rows, width, source_rows = T.dynamic("rows width source_rows")
    row_stride = T.dynamic("row_stride", "int64")
    sf_columns = T.dynamic("sf_columns")
    sf_dtype = "int32" if plan.packed else "float32"
    groups = T.ceildiv(width, plan.scale_columns)
    read = read_scale(plan.packed)
    sf_row_stride, sf_column_stride = T.dynamic("sf_row_stride sf_column_stride", "int64")
    x_rows = source_rows if plan.gathered else rows
    out_shape = (width, rows) if plan.transposed else (rows, width)

    @T.macro
    def existing(token):
        return T.max(T.min(token, x_rows - 1), 0)

    @T.macro
    def load_row(x, token, first, offset, raw, r):
        """`chunk` values of a row; past an edge the last ones again, so that no load has to wait.

        Rows that do not exist are blanked afterwards, channels that do not are never stored.
        """
        for c in T.unroll(chunk // load):
            vector = T.min(first // load + c, width // load - 1)
            for v in T.vectorized(load):
                raw[r, c * load + v] = x[existing(token), (offset // load + vector) * load + v]

    @T.macro
    def blank_row(token, raw, r):
        """Zeros, for a row that does not exist."""
        if token < 0 or token >= x_rows:
            for v in T.vectorized(chunk):
                raw[r, v] = T.cast(T.float32(0), dtype)

    @T.macro
    def values_of(kept, row_scales, r, values):
        """A row of the thread as float32."""
        if paired:  # whole words: the compiler would keep each half in a register of its own
            words = T.view(kept, (rows_per_thread, chunk // 2), T.uint32)
            for v in T.unroll(chunk // 2):
                values[2 * v] = low_half(words[r, v])
                values[2 * v + 1] = high_half(words[r, v])
        else:
            # Read as it was written, or the compiler leaves it in memory.
            for v in T.vectorized(chunk) if load >= 4 else T.unroll(chunk):
                values[v] = T.cast(kept[r, v], T.float32)
        if scaled:
            for v in T.unroll(chunk):
                values[v] = T.ieee_mul(values[v], row_scales[r])

    @T.macro
    def activate(left, right, r, clamp, values):
        """SwiGLU of a row of the thread."""
        gates = T.alloc_local((chunk,), T.float32)
        gate = T.alloc_local((1,), T.float32)
        value = T.alloc_local((1,), T.float32)
        largest = T.alloc_var(T.float32, init=T.float32(0))
        for v in T.unroll(chunk):
            gate[0] = T.cast(left[r, v], T.float32)
            value[0] = T.cast(right[r, v], T.float32)
            if plan.activation == CLAMPED_SWIGLU:
                swiglu_clamp(gate, value, clamp)
            gates[v] = gate[0]
            values[v] = value[0]
            largest = T.max(largest, T.abs(gate[0]))
        if largest < NEAR:
            for v in T.unroll(chunk):
                values[v] = near_value(gates[v], values[v])
        else:
            for v in T.unroll(chunk):
                values[v] = swiglu_value(gates[v], values[v])

    @T.macro
    def load_rows(x, x_sf, pos_to_token, first_row, first, kept, row_scales, peak, clamp):
        """All rows of the thread, and the largest magnitude of each channel.

        That of an activation is yet to be rounded like its values, which changes no order.
        """
        values = T.alloc_local((chunk,), T.float32)
        for v in T.unroll(chunk):
            peak[v] = T.float32(0)
        if activated:
            left = T.alloc_local((AHEAD, chunk), dtype)
            right = T.alloc_local((AHEAD, chunk), dtype)
            for batch in T.unroll(rows_per_thread // AHEAD):
                for r in T.unroll(AHEAD):
                    load_row(x, first_row + batch * AHEAD + r, first, 0, left, r)
                    load_row(x, first_row + batch * AHEAD + r, first, width, right, r)
                for r in T.unroll(AHEAD):
                    blank_row(first_row + batch * AHEAD + r, left, r)
                    blank_row(first_row + batch * AHEAD + r, right, r)
                    activate(left, right, r, clamp, values)
                    for v in T.unroll(chunk):
                        peak[v] = T.max(peak[v], T.abs(values[v]))
                    for v in T.vectorized(chunk):
                        kept[batch * AHEAD + r, v] = T.cast(values[v], kept_dtype)
        else:
            if plan.gathered:
                tokens = T.alloc_local((rows_per_thread,), T.int32)
                for r in T.unroll(rows_per_thread):
                    tokens[r] = -1
                    if first_row + r < rows:
                        tokens[r] = pos_to_token[first_row + r]
            if scaled:
                # Always true, but no load is moved out of it and down to its use: an eighth faster.
                if x_rows > 0:
                    for r in T.unroll(rows_per_thread):
                        token = tokens[r] if plan.gathered else first_row + r
                        load_row(x, token, first, 0, kept, r)
                        group_of_row = T.min(first // plan.scale_columns, groups - 1)
                        row_scales[r] = read(x_sf, existing(token), group_of_row)
            else:
                for r in T.unroll(rows_per_thread):  # of at least one row, the host sees to that
                    load_row(x, tokens[r] if plan.gathered else first_row + r, first, 0, kept, r)
            for r in T.unroll(rows_per_thread):
                token = tokens[r] if plan.gathered else first_row + r
                blank_row(token, kept, r)
                if scaled:
                    if token < 0 or token >= x_rows:
                        row_scales[r] = T.float32(0)
            if paired:  # two at once
                words = T.view(kept, (rows_per_thread, chunk // 2), T.uint32)
                magnitudes = T.alloc_local((chunk,), kept_dtype)
                magnitude_words = T.view(magnitudes, (chunk // 2,), T.uint32)
                largest = T.alloc_local((chunk,), kept_dtype)
                for v in T.vectorized(chunk):
                    largest[v] = T.cast(T.float32(0), kept_dtype)
                for r in T.unroll(rows_per_thread):
                    for v in T.unroll(chunk // 2):
                        magnitude_words[v] = words[r, v] & T.uint32(0x7FFF7FFF)
                    for v in T.vectorized(chunk):
                        largest[v] = T.max(largest[v], magnitudes[v])
                for v in T.vectorized(chunk):
                    peak[v] = T.cast(largest[v], T.float32)
            else:
                for r in T.unroll(rows_per_thread):
                    values_of(kept, row_scales, r, values)
                    for v in T.unroll(chunk):
                        peak[v] = T.max(peak[v], T.abs(values[v]))

    @T.macro
    def store_rows(kept, row_scales, inverse, out, first_row, first):
        values = T.alloc_local((chunk,), T.float32)
        codes = T.alloc_local((chunk,), out_dtype)
        for r in T.unroll(rows_per_thread):
            if first_row + r < rows:
                values_of(kept, row_scales, r, values)
                for v in T.unroll(chunk):
                    values[v] = T.ieee_mul(values[v], inverse[v])
                for v in T.vectorized(chunk):
                    codes[v] = T.cast(values[v], out_dtype)
                for c in T.unroll(chunk // store):
                    if first + c * store < width:
                        for v in T.vectorized(store):
                            out[first_row + r, first + c * store + v] = codes[c * store + v]

    @T.macro
    def transpose_channel(column, factor, tile, position, channel):
        """The values of the thread's rows in one channel to the transposed tile."""
        codes = T.alloc_local((rows_per_thread,), out_dtype)
        for r in T.unroll(rows_per_thread):
            column[r] = T.ieee_mul(column[r], factor)
        for r in T.vectorized(rows_per_thread):
            codes[r] = T.cast(column[r], out_dtype)
        for r in T.vectorized(rows_per_thread):
            tile[channel, position + r] = codes[r]

    @T.macro
    def transpose_group(kept, row_scales, inverse, tile, row, g):
        """The thread's rows to the transposed tile, channel by channel."""
        column = T.alloc_local((rows_per_thread,), T.float32)
        position = ((row // slots) ^ (g % chunks)) * slots + row % slots
        if paired:
            words = T.view(kept, (rows_per_thread, chunk // 2), T.uint32)
            for v in T.unroll(chunk // 2):
                for r in T.unroll(rows_per_thread):
                    column[r] = low_half(words[r, v])
                transpose_channel(column, inverse[2 * v], tile, position, g * chunk + 2 * v)
                for r in T.unroll(rows_per_thread):
                    column[r] = high_half(words[r, v])
                transpose_channel(column, inverse[2 * v + 1], tile, position, g * chunk + 2 * v + 1)
        else:
            for v in T.unroll(chunk):
                for r in T.unroll(rows_per_thread):
                    column[r] = T.cast(kept[r, v], T.float32)
                    if scaled:
                        column[r] = T.ieee_mul(column[r], row_scales[r])
                transpose_channel(column, inverse[v], tile, position, g * chunk + v)

    @T.macro
    def store_turned(tile, out, first_row, first_col, tx):
        line = T.alloc_local((store,), out_dtype)
        for step in T.unroll(out_steps) if out_steps <= MAX_UNROLLED else T.serial(out_steps):
            column = (step * threads + tx) // out_lanes
            row = tx % out_lanes * store
            swizzle = (row // slots) ^ (column // chunk % chunks)
            if first_col + column < width and first_row + row < rows:
                for v in T.vectorized(store):
                    line[v] = tile[column, swizzle * slots + row % slots + v]
                for v in T.vectorized(store):
                    out[first_col + column, first_row + row + v] = line[v]

    @T.prim_func
    def cast_channels(
        x: T.StridedTensor[(x_rows, halves * width), (row_stride, 1), dtype],
        x_sf: T.StridedTensor[(x_rows, sf_columns), (sf_row_stride, sf_column_stride), sf_dtype],
        pos_to_token: T.Tensor[(rows,), T.int32],
        out: T.Tensor[out_shape, out_dtype],
        sf: T.Tensor[(T.ceildiv(rows, group), width), T.float32],
        clamp_min: T.float32,
        clamp: T.float32,
    ):
        tiles_down = T.ceildiv(rows, tile_rows)
        tiles_across = T.ceildiv(width, columns)
        with T.Kernel(
            tiles_down if plan.rows_on_x else tiles_across,
            tiles_across if plan.rows_on_x else tiles_down,
            threads=threads,
        ) as (bx, by):
            T.assume(row_stride % load == 0)
            T.assume(width % (load if plan.transposed else math.lcm(load, store)) == 0)
            if plan.transposed:
                T.assume(rows % store == 0)
            T.annotate_min_blocks_per_sm(plan.blocks)
            tx = T.get_thread_binding()
            warp, lane = tx // LANES, tx % LANES
            g = warp % (across // lanes) * lanes + lane % lanes
            row_group = warp // (across // lanes) * (LANES // lanes) + lane // lanes
            first_row = (bx if plan.rows_on_x else by) * tile_rows
            first_col = (by if plan.rows_on_x else bx) * columns
            row = row_group * rows_per_thread
            kept = T.alloc_local((rows_per_thread, chunk), kept_dtype)
            row_scales = T.alloc_local((rows_per_thread,), T.float32)
            peak = T.alloc_local((chunk,), T.float32)
            inverse = T.alloc_local((chunk,), T.float32)
            scale = T.alloc_local((2,), T.float32)
            # The largest magnitudes, then the factors: one buffer, as two would share memory.
            meeting = T.alloc_shared((row_groups + scale_rows, columns), T.float32)

            load_rows(
                x, x_sf, pos_to_token, first_row + row, first_col + g * chunk, kept, row_scales,
                peak, clamp,
            )  # fmt: skip
            for v in T.vectorized(chunk):
                meeting[row_group, g * chunk + v] = peak[v]
            T.sync_threads()
            for step in T.unroll(scale_steps):
                item = step * threads + tx
                if item < scale_rows * columns:
                    part, column = item // columns, item % columns
                    amax = T.alloc_var(T.float32, init=T.float32(0))
                    for i in T.unroll(per_scale):
                        amax = T.max(amax, meeting[part * per_scale + i, column])
                    if activated:
                        amax = T.cast(T.cast(amax, kept_dtype), T.float32)
                    make_scale(amax, clamp_min, scale)
                    meeting[row_groups + part, column] = scale[1]
                    if first_row + part * group < rows and first_col + column < width:
                        sf[first_row // group + part, first_col + column] = scale[0]
            T.sync_threads()
            for v in T.vectorized(chunk):
                inverse[v] = meeting[row_groups + row // group, g * chunk + v]
            if plan.transposed:
                tile = T.alloc_shared((columns, tile_rows), out_dtype)
                transpose_group(kept, row_scales, inverse, tile, row, g)
                T.sync_threads()
                store_turned(tile, out, first_row, first_col, tx)
            else:
                store_rows(kept, row_scales, inverse, out, first_row + row, first_col + g * chunk)

    return cast_channels
