"""Tile sizes of the transposes. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import Device

ACCESS_BYTES = 16  # the widest global access


class Tile(NamedTuple):
    rows: int
    cols: int
    threads: int
    blocks: int  # resident on one multiprocessor, at least: bounds the registers


# By width of an element, fastest on an H200: rows of 256 bytes in and out, where 16-byte accesses
# are possible; smaller where they are not, because threads then take many more steps.
WIDE = {
    1: Tile(256, 256, threads=512, blocks=3),
    2: Tile(128, 128, threads=256, blocks=4),
    4: Tile(64, 64, threads=256, blocks=4),
    8: Tile(32, 32, threads=256, blocks=4),
}
NARROW = {
    1: Tile(128, 128, threads=256, blocks=1),
    2: Tile(64, 128, threads=256, blocks=1),
    4: Tile(64, 64, threads=256, blocks=1),
    8: Tile(32, 32, threads=256, blocks=1),
}
MAX_BLOCKS_ON_Y = 65535


class Plan(NamedTuple):
    """`load` and `store` are elements of `width` bytes per global access."""

    dtype: str
    width: int
    batched: bool
    load: int
    store: int
    tile_rows: int
    tile_cols: int
    threads: int
    blocks: int
    rows_on_x: bool


def store_width(widest: int, *starts: int) -> int:
    """Elements per store of a transposed matrix, whose rows are as long as there were rows before.

    These follow the number of tokens. Of 1-byte elements 8 at a time are left out, so that four
    kernels serve every number.
    """
    store = math.gcd(widest, *starts)
    return 4 if store == 8 < widest else store


def plan(
    dtype: str,
    width: int,
    rows: int,
    cols: int,
    row_stride: int,
    batch_stride: int | None,
    alignment: int,
    device: Device,
) -> Plan:
    """The widest accesses that every row start allows, of `x` and of the output.

    Strides are in elements, `batch_stride` is None for a single matrix; `alignment` is what
    divides the address of `x`, in bytes.
    """
    widest = ACCESS_BYTES // width
    starts = (cols, row_stride, batch_stride or 0, max(alignment // width, 1))
    load, store = math.gcd(widest, *starts), store_width(widest, rows)
    tile = (WIDE if load == store == widest else NARROW)[width]
    if tile.rows * tile.cols * width * tile.blocks > device.smem_per_sm:
        tile = Tile(tile.rows // 2, tile.cols // 2, tile.threads // 2, tile.blocks)
    # Writing long runs of the output pays more than reading long runs of x, so blocks walk down
    # the rows, unless the columns need the grid's x axis, the only one without a limit.
    rows_on_x = cols <= tile.cols * MAX_BLOCKS_ON_Y
    return Plan(dtype, width, batch_stride is not None, load, store, *tile, rows_on_x)
