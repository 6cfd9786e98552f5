"""From quantized data back to bfloat16 or float32."""

import math
from typing import Any

from tilelang import language as T

from tile_kernels.quant.back.plan import THREADS, Plan
from tile_kernels.quant.primitives import e2m1_value, e5m6_value, read_scale
from tile_kernels.quant.storage import access_width, scale_bits, storage, units
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = Plan(*static)
    loads = {access_width(plan.source, plan.load), scale_bits(plan.sf_dtype) * plan.scales}
    if plan.has_factor:
        loads.add(32)
    return tuple(sorted(loads)), access_width(plan.out, plan.store)


@T.macro
def unpack_e5m6(words, first, values):
    """Three words, from `first` on, to eight values."""
    values[0] = e5m6_value((words[first] >> 20) & 0xFFF)
    values[1] = e5m6_value((words[first] >> 8) & 0xFFF)
    values[2] = e5m6_value(((words[first] & 0xFF) << 4) | ((words[first + 1] >> 28) & 0xF))
    values[3] = e5m6_value((words[first + 1] >> 16) & 0xFFF)
    values[4] = e5m6_value((words[first + 1] >> 4) & 0xFFF)
    values[5] = e5m6_value(((words[first + 1] & 0xF) << 8) | ((words[first + 2] >> 24) & 0xFF))
    values[6] = e5m6_value((words[first + 2] >> 12) & 0xFFF)
    values[7] = e5m6_value(words[first + 2] & 0xFFF)


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_rows_back(*static: Any) -> Any:
    """A thread per chunk of `rows` neighbouring rows; if these share scales, it reads them once."""
    plan = Plan(*static)
    chunk = plan.chunk
    vectors = plan.width // chunk
    elements = units(plan.source, chunk)
    at_once = 1 if plan.source == "e5m6" else units(plan.source, plan.load)
    shared = plan.block_rows % plan.rows == 0  # all rows of a thread are in one block
    run = math.gcd(plan.block_channels, chunk)  # values that surely share a scale
    lookups = chunk // run
    source_dtype, out_dtype = storage(plan.source)[0], storage(plan.out)[0]
    rows, row_stride = T.dynamic("rows row_stride")
    sf_rows, sf_row_stride, sf_column_stride = T.dynamic("sf_rows sf_row_stride sf_column_stride")
    groups = -(-plan.width // plan.block_channels)
    packed = plan.sf_dtype == "int32"
    sf_columns = -(-groups // 4) if packed else groups
    column_stride = 1 if plan.scales > 1 else sf_column_stride
    read = read_scale(packed)

    @T.macro
    def look_up(sf, m, first, scales, base):
        if plan.scales > 1:
            for i in T.unroll(lookups // plan.scales):
                for v in T.vectorized(plan.scales):
                    scales[base + i * plan.scales + v] = sf[
                        m, (first // plan.scales + i) * plan.scales + v
                    ]
        else:
            for i in T.unroll(lookups):
                scales[base + i] = read(sf, m, (first + i * run) // plan.block_channels)

    @T.prim_func
    def cast_back(
        x: T.StridedTensor[(rows, units(plan.source, plan.width)), (row_stride, 1), source_dtype],
        sf: T.StridedTensor[(sf_rows, sf_columns), (sf_row_stride, column_stride), plan.sf_dtype],
        factor: T.Tensor[(1,), T.float32],
        out: T.Tensor[(rows, plan.width), out_dtype],
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(rows, plan.rows) * vectors, THREADS), threads=THREADS
        ) as block:
            T.assume(row_stride % at_once == 0)
            if plan.scales > 1:
                T.assume(sf_row_stride % plan.scales == 0)
            index = block * THREADS + T.get_thread_binding()
            top = T.alloc_var(T.int32, init=index // vectors * plan.rows)
            vector = T.alloc_var(T.int32, init=index % vectors)
            raw = T.alloc_local((plan.rows * elements,), source_dtype)
            scales = T.alloc_local((lookups * (1 if shared else plan.rows),), T.float32)
            values = T.alloc_local((chunk,), T.float32)
            rounded = T.alloc_local((chunk,), out_dtype)
            if top < rows:
                for r in T.unroll(plan.rows):
                    if top + r < rows:
                        for i in T.unroll(elements // at_once):
                            for v in T.vectorized(at_once):
                                raw[r * elements + i * at_once + v] = x[
                                    top + r, (vector * (elements // at_once) + i) * at_once + v
                                ]
                if shared:
                    look_up(sf, top // plan.block_rows, vector * chunk, scales, 0)
                else:
                    for r in T.unroll(plan.rows):
                        if top + r < rows:
                            look_up(
                                sf, (top + r) // plan.block_rows, vector * chunk, scales,
                                r * lookups,
                            )  # fmt: skip
                if plan.has_factor:
                    for i in T.unroll(lookups * (1 if shared else plan.rows)):
                        scales[i] = T.ieee_mul(scales[i], factor[0])
                for r in T.unroll(plan.rows):
                    if top + r < rows:
                        if plan.source == "e5m6":
                            unpack_e5m6(raw, r * elements, values)
                        elif plan.source == "e2m1":
                            for v in T.unroll(elements):
                                pair = T.alloc_var(
                                    T.int32, init=T.cast(raw[r * elements + v], T.int32)
                                )
                                values[2 * v] = e2m1_value(pair & 15)
                                values[2 * v + 1] = e2m1_value(pair >> 4)
                        else:
                            for v in T.vectorized(elements):
                                values[v] = T.cast(raw[r * elements + v], T.float32)
                        for v in T.unroll(chunk):
                            values[v] = T.ieee_mul(
                                values[v], scales[(0 if shared else r * lookups) + v // run]
                            )
                        for i in T.unroll(chunk // plan.store):
                            for v in T.vectorized(plan.store):
                                rounded[i * plan.store + v] = T.cast(
                                    values[i * plan.store + v], out_dtype
                                )
                            for v in T.vectorized(plan.store):
                                out[
                                    top + r,
                                    (vector * (chunk // plan.store) + i) * plan.store + v,
                                ] = rounded[i * plan.store + v]

    return cast_back
