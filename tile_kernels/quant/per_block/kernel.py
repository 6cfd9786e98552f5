"""Casts with scales for blocks of rows and channels."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.per_block.plan import Plan, Tile
from tile_kernels.quant.per_block.primitives import (
    place_of,
    scale_storage,
    team_max,
    write_block_scale,
)
from tile_kernels.quant.primitives import e2m1_prelude, encode_and_store, scale_of, unit_of_factors
from tile_kernels.quant.storage import (
    GIVEN,
    PACKED,
    SCALES,
    cast_accesses,
    is_packed,
    storage,
    units,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    return cast_accesses(plan, plan.fmt, scale_bits=8 if is_packed(plan.layout) else 32)


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_blocks(*static: Any) -> Any:
    """A team per row of blocks and `lanes * chunk` channels; the values stay in registers."""
    plan = Plan(*static)
    tile = Tile(plan.rows, plan.channels, plan.chunk, plan.lanes, plan.team)
    chunk, steps = plan.chunk, tile.steps
    teams = plan.threads // tile.team
    tiles = -(-plan.width // tile.width)
    groups = -(-plan.width // plan.channels)
    dtype = storage(plan.source)[0]
    largest = team_max(tile, teams, "float32")
    scaled = scale_of(plan.fmt, plan.round_sf)
    written = write_block_scale(plan.layout, groups)
    encode = encode_and_store(plan.fmt, plan.width, chunk, plan.store, conversion=plan.conversion)
    unit = unit_of_factors(plan.conversion)

    rows, blocks, padded = T.dynamic("rows blocks padded")
    row_stride, sf_stride = T.dynamic("row_stride sf_stride")
    shape, scales = scale_storage(plan.layout, blocks, groups, padded)

    @T.prim_func
    def cast_row_of_blocks(
        x: T.StridedTensor[(rows, plan.width), (row_stride, 1), dtype],
        out: T.Tensor[(rows, units(plan.fmt, plan.width)), storage(plan.fmt)[0]],
        sf: T.StridedTensor[shape, (sf_stride, 1), scales],
        clamp_min: T.float32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(rows, plan.rows) * tiles, teams),
            threads=plan.threads,
            prelude=e2m1_prelude(plan.conversion),
        ) as block:
            T.assume(row_stride % plan.load == 0)
            tx = T.get_thread_binding()
            m, first, top = place_of(tile, tiles, block * teams + tx // tile.team)
            row = T.alloc_var(T.int32)
            raw = T.alloc_local((steps * chunk,), dtype)
            values = T.alloc_local((chunk,), T.float32)
            scale = T.alloc_local((2,), T.float32)
            inverse = T.alloc_local((1,), T.float32)
            amax = T.alloc_var(T.float32, init=T.float32(0))
            # Past an edge: the last row or the last channels again, which are in the same block.
            for s in T.unroll(steps):
                row = T.min(m * plan.rows + s * tile.at_a_time + top, rows - 1)
                for c in T.unroll(chunk // plan.load):
                    vector = T.min(first // plan.load + c, plan.width // plan.load - 1)
                    for v in T.vectorized(plan.load):
                        raw[s * chunk + c * plan.load + v] = x[row, vector * plan.load + v]
            g = first // plan.channels
            if plan.task == GIVEN:
                inverse[0] = T.float32(0)
                if m * plan.rows < rows and first < plan.width:
                    inverse[0] = T.ieee_fdiv(T.float32(1), sf[m, g])
            else:
                for i in T.unroll(steps * chunk):
                    amax = T.max(amax, T.abs(T.cast(raw[i], T.float32)))
                scaled(largest(amax, tx), clamp_min, scale)
                inverse[0] = T.ieee_mul(scale[1], T.float32(unit)) if unit != 1 else scale[1]
                if top == 0 and tx % tile.sharing == 0:
                    if m * plan.rows < rows and first < plan.width:
                        written(
                            sf, m, g, T.ceildiv(rows, plan.rows),
                            padded // 4 if plan.layout == PACKED else padded, scale[0],
                        )  # fmt: skip
            if plan.task != SCALES:
                for s in T.unroll(steps):
                    row = m * plan.rows + s * tile.at_a_time + top
                    if row < rows:
                        for v in T.unroll(chunk):
                            values[v] = T.cast(raw[s * chunk + v], T.float32)
                        encode(values, 0, inverse, chunk, out, row, first)

    return cast_row_of_blocks
