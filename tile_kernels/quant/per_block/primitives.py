"""Macros of kernels whose threads lie over blocks of rows and channels, see `Tile`."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.per_block.plan import Tile
from tile_kernels.quant.primitives import exponent_of, write_scale
from tile_kernels.quant.storage import LANES, PACKED, PACKED_ROW, ROW, is_by_rows, is_packed


def place_of(tile: Tile, tiles: int, team: Any) -> tuple[Any, Any, Any]:
    """In a kernel: the row of blocks, the thread's first channel, and its first row in the block.

    `tiles` of `tile` are as wide as a row; `team` counts teams over the whole grid.
    """
    tx = T.get_thread_binding()
    return (
        T.alloc_var(T.int32, init=team // tiles),
        T.alloc_var(T.int32, init=(team % tiles * tile.lanes + tx % tile.lanes) * tile.chunk),
        T.alloc_var(T.int32, init=tx % tile.team // tile.lanes),
    )


def scale_storage(layout: str, blocks: Any, groups: int, padded: Any) -> tuple[Any, str]:
    """The shape and the dtype of a buffer for the scales of `blocks x groups` blocks."""
    if layout == ROW:
        return (blocks, groups), "float32"
    words = -(-groups // 4)
    if layout == PACKED:
        return (words, padded), "uint8"
    if layout == PACKED_ROW:
        return (blocks, 4 * words), "uint8"
    return (groups, padded), "float32"


def team_max(tile: Tile, teams: int, dtype: str) -> Any:
    """A macro: the largest `value` of all threads of a block. All threads of the kernel call it."""
    warps = tile.team // LANES
    blocks = tile.lanes // tile.sharing
    # Distances between lanes of one block: neighbours, and the same channels of other rows.
    distances = [d for d in (1, 2, 4, 8, 16) if d < tile.sharing or d >= tile.lanes]

    @T.macro
    def reduced(value, tx):
        largest = T.alloc_var(dtype, init=value)
        for d in distances:
            largest = T.max(largest, T.shfl_xor(largest, d))
        if warps > 1:
            shared = T.alloc_shared((teams * warps, blocks), dtype)
            column = tx % tile.lanes // tile.sharing
            lane = tx % LANES
            if lane % min(tile.sharing, LANES) == 0 and lane < tile.lanes:
                shared[tx // LANES, column] = largest
            T.sync_threads()
            for w in T.unroll(warps):
                largest = T.max(largest, shared[tx // tile.team * warps + w, column])
        return largest

    return reduced


def write_block_scale(layout: str, groups: int) -> Any:
    """A macro: the scale of block `(m, g)`, with the padding after the last row and the last group.

    A packed scale is a byte of its buffer.
    """
    write = write_scale(layout)
    words = -(-groups // 4)

    @T.macro
    def write_byte(sf, m, g, value):
        if layout == PACKED_ROW:
            sf[m, g] = T.cast(value, T.uint8)
        else:
            sf[g // 4, m * 4 + g % 4] = T.cast(value, T.uint8)
        if groups % 4:
            if g == groups - 1:
                for i in T.unroll(4 * words - groups):
                    if layout == PACKED_ROW:
                        sf[m, groups + i] = T.uint8(0)
                    else:
                        sf[words - 1, m * 4 + groups % 4 + i] = T.uint8(0)

    @T.macro
    def written(sf, m, g, blocks, padded, scale):
        if is_packed(layout):
            write_byte(sf, m, g, exponent_of(scale))
        else:
            write(sf, m, g, scale)
        if not is_by_rows(layout):
            if m == blocks - 1:
                for i in T.unroll(3):
                    if blocks + i < padded:
                        if layout == PACKED:
                            write_byte(sf, blocks + i, g, 0)
                        else:
                            write(sf, blocks + i, g, T.float32(0))

    return written
