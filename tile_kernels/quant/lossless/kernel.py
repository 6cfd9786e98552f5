"""From e2m1 to e4m3 in larger blocks, without loss: sums of exponents."""

import math
from typing import Any

from tilelang import language as T

from tile_kernels.quant.lossless.plan import MAX_KEPT, Plan
from tile_kernels.quant.per_block.plan import THREADS, Tile
from tile_kernels.quant.per_block.primitives import (
    place_of,
    scale_storage,
    team_max,
    write_block_scale,
)
from tile_kernels.quant.primitives import e2m1_value
from tile_kernels.quant.storage import PACKED, access_width, is_packed
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

SHIFT = 6  # an e2m1 value times 2**6 is at most 384, which e4m3 holds
LEAST = -5  # half of 2**-5 is the least normal number of e4m3
WORD = 8  # values in 32 bits of e2m1


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    loads = {access_width("e2m1", plan.load), 32}
    stores = {access_width("e4m3", plan.store), 8 if is_packed(plan.layout) else 32}
    return tuple(sorted(loads)), tuple(sorted(stores))


@T.macro
def rounded_code(magnitude, factor):
    """The e4m3 code of an e2m1 magnitude (its code) times a power of two, to nearest."""
    code = T.alloc_local((1,), T.float8_e4m3fn)
    code[0] = T.cast(T.ieee_mul(e2m1_value(magnitude), factor), T.float8_e4m3fn)
    return T.cast(T.reinterpret(code[0], T.uint8), T.uint32)


@T.macro
def factor_of(exponent, out_exponent):
    """2**(difference), zero where that is too small or the source's scale is zero."""
    biased = T.alloc_var(T.int32, init=T.max(127 + exponent - out_exponent, 0))
    if exponent == 0:
        biased = 0
    return T.reinterpret(biased << 23, T.float32)


@T.macro
def fill_table(exponent, out_exponent, table):
    """The e4m3 codes of the eight magnitudes of e2m1 under a scale, as bytes of two words."""
    shift = T.alloc_var(T.int32, init=exponent - out_exponent)
    # 0, then an exponent alone (0.5), then exponents and a bit of mantissa: 1, 1.5, ... 6.
    table[0] = T.cast(shift + 6, T.uint32) * T.uint32(0x08080800) + T.uint32(0x0C080000)
    table[1] = T.cast(shift + 6, T.uint32) * T.uint32(0x08080808) + T.uint32(0x1C181410)
    if shift < LEAST or exponent == 0:
        factor = T.alloc_var(T.float32, init=factor_of(exponent, out_exponent))
        table[0] = T.uint32(0)
        table[1] = T.uint32(0)
        for i in T.serial(4):
            table[0] = table[0] | (rounded_code(i, factor) << T.cast(8 * i, T.uint32))
            table[1] = table[1] | (rounded_code(i + 4, factor) << T.cast(8 * i, T.uint32))


@T.macro
def four_codes(table, selectors):
    """Four e2m1 codes, in the low 16 bits, to four bytes of e4m3."""
    magnitudes = T.call_extern(
        T.uint32, "__byte_perm", table[0], table[1], selectors & T.uint32(0x7777)
    )
    signs = T.call_extern(
        T.uint32, "__byte_perm", T.uint32(0x8000), T.uint32(0),
        (selectors >> T.uint32(3)) & T.uint32(0x1111),
    )  # fmt: skip
    return magnitudes | signs


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_lossless(*static: Any) -> Any:
    """A team per row of output blocks, as in `cast_blocks`; data and exponents in registers."""
    plan = Plan(*static)
    tile = Tile(plan.rows, plan.channels, plan.chunk, plan.lanes, plan.team)
    chunk, steps, load, store = plan.chunk, tile.steps, plan.load, plan.store
    keep = steps <= MAX_KEPT
    teams = THREADS // tile.team
    tiles = -(-plan.width // tile.width)
    groups = -(-plan.width // plan.channels)
    run = math.gcd(plan.in_channels, chunk)  # values that surely share a scale
    lookups = chunk // run
    # Elements of the buffers: words, or bytes.
    per_in, per_out = (WORD, 4) if plan.words else (2, 1)
    in_dtype, out_dtype = ("uint32", "uint32") if plan.words else ("uint8", "float8_e4m3fn")
    elements = chunk // per_in
    largest = team_max(tile, teams, "int32")
    written = write_block_scale(plan.layout, groups)

    in_groups = -(-plan.width // plan.in_channels)
    in_columns = -(-in_groups // 4) if plan.in_packed else in_groups
    in_scales = "int32" if plan.in_packed else "float32"
    rows, blocks, padded = T.dynamic("rows blocks padded")
    row_stride, sf_stride = T.dynamic("row_stride sf_stride")
    in_rows, in_stride, in_column_stride = T.dynamic("in_rows in_stride in_column_stride")
    shape, scales = scale_storage(plan.layout, blocks, groups, padded)

    @T.macro
    def exponent_at(x_sf, m, g):
        if plan.in_packed:
            return (x_sf[m, g // 4] >> (g % 4 * 8)) & 255
        return (T.reinterpret(x_sf[m, g], T.int32) >> 23) & 255

    @T.macro
    def load_row(x, x_sf, row, first, raw, exponents, base):
        """The data of a row and its exponents; past its end the last ones again."""
        for c in T.unroll(chunk // load):
            vector = T.min(first // load + c, plan.width // load - 1)
            for v in T.vectorized(load // per_in):
                raw[base * elements + c * (load // per_in) + v] = x[
                    row, vector * (load // per_in) + v
                ]
        for i in T.unroll(lookups):
            exponents[base * lookups + i] = exponent_at(
                x_sf,
                row // plan.in_rows,
                T.min((first + i * run) // plan.in_channels, in_groups - 1),
            )

    @T.macro
    def store_row(out, row, first, raw, exponents, base, out_exponent):
        encoded = T.alloc_local((chunk // per_out,), out_dtype)
        if plan.words:
            table = T.alloc_local((2,), T.uint32)
            for i in T.unroll(elements):
                if i * WORD % run == 0:
                    fill_table(exponents[base * lookups + i * WORD // run], out_exponent, table)
                encoded[2 * i] = four_codes(table, raw[base * elements + i])
                encoded[2 * i + 1] = four_codes(table, raw[base * elements + i] >> T.uint32(16))
        else:
            for i in T.unroll(chunk):
                code = (T.cast(raw[base * elements + i // 2], T.int32) >> (i % 2 * 4)) & 15
                factor = factor_of(exponents[base * lookups + i // run], out_exponent)
                encoded[i] = T.cast(T.ieee_mul(e2m1_value(code), factor), out_dtype)
        for c in T.unroll(chunk // store):
            if first + c * store < plan.width:
                for v in T.vectorized(store // per_out):
                    out[row, (first // store + c) * (store // per_out) + v] = encoded[
                        c * (store // per_out) + v
                    ]

    @T.prim_func
    def cast_up(
        x: T.StridedTensor[(rows, plan.width // per_in), (row_stride, 1), in_dtype],
        x_sf: T.StridedTensor[(in_rows, in_columns), (in_stride, in_column_stride), in_scales],
        out: T.Tensor[(rows, plan.width // per_out), out_dtype],
        sf: T.StridedTensor[shape, (sf_stride, 1), scales],
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(rows, plan.rows) * tiles, teams), threads=THREADS
        ) as block:
            T.assume(row_stride % (load // per_in) == 0)
            tx = T.get_thread_binding()
            m, first, top = place_of(tile, tiles, block * teams + tx // tile.team)
            inside = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            raw = T.alloc_local((elements * (steps if keep else 1),), in_dtype)
            exponents = T.alloc_local((lookups * (steps if keep else 1),), T.int32)
            max_exponent = T.alloc_var(T.int32, init=0)
            # Past an edge: the last row again, which is in the same block.
            for s in T.unroll(steps) if keep else T.serial(steps):
                inside = T.min(s * tile.at_a_time + top, plan.rows - 1)
                row = T.min(m * plan.rows + inside, rows - 1)
                base = s if keep else 0
                load_row(x, x_sf, row, first, raw, exponents, base)
                for i in T.unroll(lookups):
                    max_exponent = T.max(max_exponent, exponents[base * lookups + i])
            out_exponent = T.alloc_var(T.int32, init=T.max(largest(max_exponent, tx) - SHIFT, 1))
            if top == 0 and tx % tile.sharing == 0:
                if m * plan.rows < rows and first < plan.width:
                    written(
                        sf, m, first // plan.channels, T.ceildiv(rows, plan.rows),
                        padded // 4 if plan.layout == PACKED else padded,
                        T.reinterpret(out_exponent << 23, T.float32),
                    )  # fmt: skip
            for s in T.unroll(steps) if keep else T.serial(steps):
                inside = s * tile.at_a_time + top
                row = m * plan.rows + inside
                base = s if keep else 0
                if inside < plan.rows and row < rows:
                    if not keep:
                        load_row(x, x_sf, row, first, raw, exponents, base)
                    store_row(out, row, first, raw, exponents, base, out_exponent)

    return cast_up
