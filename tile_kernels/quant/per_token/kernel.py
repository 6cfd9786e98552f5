"""Casts with scales along rows: a scale for every group of channels, or one for a whole row."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.per_token.plan import BLOCKS_PER_SM, MAX_KEPT, RESIDENT, WARPS, Plan
from tile_kernels.quant.primitives import (
    e2m1_prelude,
    e4m3_scale_of,
    encode_and_store,
    encode_e5m6,
    fetch_values,
    group_amax,
    multiply_scales,
    round_trip,
    scale_of,
    scale_of_row,
    store_values,
    unit_of_factors,
    widen_values,
    write_group_scales,
)
from tile_kernels.quant.stochastic_primitives import round_and_store
from tile_kernels.quant.storage import (
    CAST,
    FAKE,
    GIVEN,
    LANES,
    NEAREST,
    SCALES,
    SEEDED,
    cast_accesses,
    is_by_rows,
    is_e4m3,
    is_packed,
    scale_bits,
    scale_dtype,
    storage,
    units,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    source_bits = scale_bits(plan.source_scales) if plan.source_scales else 0
    loads, stores = cast_accesses(
        plan, target(plan), scale_bits(scale_dtype(plan.layout)), source_bits
    )
    if plan.has_factor:
        loads = tuple(sorted({*loads, 32}))
    if plan.rounding == SEEDED:
        loads = tuple(sorted({*loads, 64}))
    return loads, stores


def target(plan: Plan) -> str:
    """What `out` holds."""
    return plan.source if plan.task == FAKE else plan.fmt


def finish(plan: Plan) -> Any:
    """A macro: a chunk of values, from `base` on, to its place in `out`."""
    stochastic = plan.rounding != NEAREST
    if stochastic:
        seeded = plan.rounding == SEEDED
        rounded_to = round_and_store(plan.fmt, plan.width, plan.chunk, plan.store, seeded)
    encode = encode_and_store(
        plan.fmt, plan.width, plan.chunk, plan.store, conversion=plan.conversion
    )
    rounded = round_trip(plan.fmt, plan.chunk, plan.conversion)
    store = store_values(plan.source, plan.width, plan.chunk, plan.store)

    @T.macro
    def finished(values, base, scales, inverse, per, out, row, first, seed):
        if stochastic:
            rounded_to(values, inverse, per, out, row, first, seed)
        elif plan.task == FAKE:
            rounded(values, base, scales, inverse, per)
            store(values, base, out, row, first)
        else:
            encode(values, base, inverse, per, out, row, first)

    return finished


def signature(plan: Plan, body: Any, grid: Any) -> Any:
    """The kernel around `body`: buffers as the layouts have them."""
    rows, padded, row_stride = T.dynamic("rows padded row_stride")
    sf_rows, sf_columns = T.dynamic("sf_rows sf_columns")
    sf_row_stride, sf_column_stride = T.dynamic("sf_row_stride sf_column_stride")
    groups = -(-plan.width // plan.group)
    columns = -(-groups // 4) if is_packed(plan.layout) else groups
    scales_dtype = scale_dtype(plan.layout)
    shape = (rows, columns) if is_by_rows(plan.layout) else (columns, padded)
    source_dtype, out_dtype = storage(plan.source)[0], storage(target(plan))[0]
    if plan.rounding != NEAREST:
        out_dtype = "uint8"
    in_scales = plan.source_scales or "float32"
    to_write = rows if is_by_rows(plan.layout) else padded

    @T.prim_func
    def cast_rows(
        x: T.StridedTensor[(rows, units(plan.source, plan.width)), (row_stride, 1), source_dtype],
        x_sf: T.StridedTensor[(sf_rows, sf_columns), (sf_row_stride, sf_column_stride), in_scales],
        out: T.Tensor[(rows, units(target(plan), plan.width)), out_dtype],
        sf: T.Tensor[shape, scales_dtype],
        factor: T.Tensor[(1,), T.float32],
        seed: T.Tensor[(1,), T.int64],
        clamp_min: T.float32,
    ):
        with T.Kernel(
            grid(to_write), threads=plan.threads, prelude=e2m1_prelude(plan.conversion)
        ) as block:
            T.assume(row_stride % units(plan.source, plan.load) == 0)
            if plan.fmt == "e5m6":
                T.annotate_min_blocks_per_sm(max(1, RESIDENT // plan.threads))
            elif plan.threads == WARPS * LANES:
                T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            body(block, rows, to_write, x, x_sf, out, sf, factor, seed, clamp_min)

    return cast_rows


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_groups(*static: Any) -> Any:
    """Groups of 16 to 128 channels: a warp takes `32 * chunk` neighbouring channels of a row.

    The lanes of a group are neighbours, as are the four groups of a packed word.
    """
    plan = Plan(*static)
    chunk, group = plan.chunk, plan.group
    tiles = -(-plan.width // (LANES * chunk))
    groups = -(-plan.width // group)
    per_thread = max(1, chunk // group)  # groups of one thread
    quantised = plan.source_rows > 0
    e4m3_scales, has_factor = is_e4m3(plan.layout), plan.has_factor
    fetch = fetch_values(plan.source, plan.width, chunk, plan.load)
    widen = widen_values(plan.source, chunk, plan.load)
    multiplied = multiply_scales(
        chunk, (plan.source_rows, plan.source_columns), plan.source_scales == "int32"
    )
    scaled = scale_of(plan.fmt, plan.round_sf)
    e4m3_scaled = e4m3_scale_of(plan.fmt, has_factor)
    finished = finish(plan)
    unit = unit_of_factors(plan.conversion)
    amax_of = group_amax(chunk, group)
    write_scales = write_group_scales(plan.layout, plan.width, chunk, group)

    @T.macro
    def body(block, rows, to_write, x, x_sf, out, sf, factor, seed, clamp_min):
        lane = T.get_thread_binding() % LANES
        warp = block * WARPS + T.get_thread_binding() // LANES
        row = T.alloc_var(T.int32, init=warp // tiles)
        first = T.alloc_var(T.int32, init=(warp % tiles * LANES + lane) * chunk)
        raw = T.alloc_local((units(plan.source, chunk),), storage(plan.source)[0])
        values = T.alloc_local((chunk,), T.float32)
        scale = T.alloc_local((2,), T.float32)
        scales = T.alloc_local((per_thread,), T.float32)
        inverse = T.alloc_local((per_thread,), T.float32)
        common = T.alloc_var(T.float32, init=T.float32(1))
        if has_factor:
            common = factor[0]
        if row < to_write:  # the same for the whole warp
            if row < rows:
                fetch(x, row, first, raw, 0)
                widen(raw, 0, values)
                if quantised:
                    multiplied(x_sf, row, first, plan.width, values)
            else:
                for v in T.unroll(chunk):
                    values[v] = T.float32(0)
            for i in T.unroll(per_thread):
                if plan.task == GIVEN:
                    inverse[i] = T.float32(0)
                    if first // group + i < groups:
                        scale[0] = T.cast(sf[row, first // group + i], T.float32)
                        if has_factor:
                            scale[0] = T.ieee_mul(scale[0], common)
                        inverse[i] = T.ieee_fdiv(T.float32(1), scale[0])
                else:
                    if e4m3_scales:
                        e4m3_scaled(amax_of(values, i), clamp_min, common, scale)
                    else:
                        scaled(amax_of(values, i), clamp_min, scale)
                    scales[i] = scale[0]
                    if has_factor and plan.task == FAKE:
                        scales[i] = T.ieee_mul(scale[0], common)
                    inverse[i] = T.ieee_mul(scale[1], T.float32(unit)) if unit != 1 else scale[1]
            if plan.task in (CAST, SCALES):
                write_scales(sf, row, first, lane, scales, row < rows)
            if plan.task != SCALES:
                if row < rows:
                    finished(values, 0, scales, inverse, chunk // per_thread, out, row, first, seed)

    return signature(plan, body, lambda count: T.ceildiv(count * tiles, WARPS))


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_whole_rows(*static: Any) -> Any:
    """One scale per row: a block per row, which stays in registers if it is not too long.

    The words of e5m6, three for eight values, meet in shared memory and leave 16 bytes at a time.
    """
    plan = Plan(*static)
    chunk, threads, width = plan.chunk, plan.threads, plan.width
    steps = -(-width // (chunk * threads))
    keep = steps * chunk <= MAX_KEPT
    kept = steps if keep else 1
    elements = units(plan.source, chunk)
    fetch = fetch_values(plan.source, width, chunk, plan.load)
    widen = widen_values(plan.source, chunk, plan.load)
    multiplied = multiply_scales(
        chunk, (plan.source_rows, plan.source_columns), plan.source_scales == "int32"
    )
    packed = plan.fmt == "e5m6" and plan.task != FAKE
    scaled_row = scale_of_row(
        plan.fmt, plan.round_sf, plan.layout, threads, written=plan.task == CAST
    )
    finished = None if packed else finish(plan)
    unit = unit_of_factors(plan.conversion)
    row_words, words_of_step = units("e5m6", width), units("e5m6", chunk * threads)
    at_once = 4 if packed and plan.store == 32 else 1

    @T.macro
    def flush(words, count, out, row, start):
        """`count` words of shared memory, which all have written, to the row, from `start` on."""
        T.sync_threads()
        for i in T.unroll(-(-count // (at_once * threads))):
            word = (i * threads + T.get_thread_binding()) * at_once
            if word < count and start + word < row_words:
                for v in T.vectorized(at_once):
                    out[row, start + word + v] = words[word + v]

    @T.macro
    def body(block, rows, to_write, x, x_sf, out, sf, factor, seed, clamp_min):
        tx = T.get_thread_binding()
        raw = T.alloc_local((kept * elements,), storage(plan.source)[0])
        values = T.alloc_local((chunk,), T.float32)
        scale = T.alloc_local((2,), T.float32)
        inverse = T.alloc_local((1,), T.float32)
        warp_maxima = T.alloc_shared((threads // LANES,), T.float32)
        amax = T.alloc_var(T.float32, init=T.float32(0))
        if block < rows:
            if keep:
                for s in T.unroll(steps):
                    fetch(x, block, (s * threads + tx) * chunk, raw, s * elements)
            for s in T.unroll(steps) if keep else T.serial(steps):
                if not keep:
                    fetch(x, block, (s * threads + tx) * chunk, raw, 0)
                widen(raw, s * elements if keep else 0, values)
                if plan.source_rows > 0:
                    multiplied(x_sf, block, (s * threads + tx) * chunk, width, values)
                for v in T.unroll(chunk):
                    amax = T.max(amax, T.abs(values[v]))
        scaled_row(amax, warp_maxima, clamp_min, scale, sf, block, block < rows)
        inverse[0] = T.ieee_mul(scale[1], T.float32(unit)) if unit != 1 else scale[1]
        if block < rows:
            if packed:
                words = T.alloc_shared((kept * words_of_step,), T.int32)
                T.sync_threads()  # it may be the memory of the warps' amax
            for s in T.unroll(steps) if keep else T.serial(steps):
                first = (s * threads + tx) * chunk
                if not keep:
                    fetch(x, block, first, raw, 0)
                widen(raw, s * elements if keep else 0, values)
                if plan.source_rows > 0:
                    multiplied(x_sf, block, first, width, values)
                if packed:
                    base = s * words_of_step if keep else 0
                    encode_e5m6(values, inverse[0], words, base + 3 * tx)
                    if not keep:
                        flush(words, words_of_step, out, block, s * words_of_step)
                        T.sync_threads()
                else:
                    finished(values, 0, scale, inverse, chunk, out, block, first, seed)
            if packed and keep:
                flush(words, kept * words_of_step, out, block, 0)

    return signature(plan, body, lambda count: count)
