"""Tiles of the casts with scales along channels. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.quant.storage import BITS
from tile_kernels.runtime.device import Device
from tile_kernels.transpose.plan import store_width

GROUPS = (32, 128)  # rows of a scale
SCALE_COLUMNS = 128  # of sources without scales, which do not use it
ACCESS_BYTES = 16
TILE_ROWS = 128  # the most rows of a scale; of 32 rows a tile has four scales per channel
MAX_BLOCKS_ON_Y = 65535

# What is done to a row of x before the cast.
NONE, SWIGLU, CLAMPED_SWIGLU = "none", "swiglu", "clamped_swiglu"

ACROSS = 16  # threads along a row of a tile
# By activation or source: rows per thread, blocks per multiprocessor (which bounds registers).
ROWS_AND_BLOCKS = {
    "bfloat16": (8, 4),
    "float32": (8, 2),
    "e4m3": (8, 3),
    SWIGLU: (8, 3),
    CLAMPED_SWIGLU: (8, 3),
}


class Plan(NamedTuple):
    """A thread has `rows_per_thread` rows of `chunk` channels; `across` threads lie along a row.

    `lanes` of them are neighbours in a warp. `load` and `store` are values per global access.
    """

    source: str
    activation: str
    transposed: bool
    group: int
    round_sf: bool
    gathered: bool
    scale_columns: int  # channels of a scale of a quantized source
    packed: bool  # its scales are exponents, four in a word
    rows_per_thread: int
    chunk: int
    across: int
    lanes: int
    load: int
    store: int
    rows_on_x: bool
    blocks: int  # resident on one multiprocessor, at least: bounds the registers


def plan(
    source: str,
    activation: str,
    transposed: bool,
    group: int,
    round_sf: bool,
    gathered: bool,
    scale_columns: int,
    packed: bool,
    rows: int,
    width: int,
    row_stride: int,
    alignment: int,
    out_alignment: int,
    device: Device,
) -> Plan:
    """The widest accesses that every row start allows, of `x` and of the output.

    Rows are 128 bytes of `x` per warp where a tile is transposed (see `cast_columns`), else enough
    for 128 bytes of output. `row_stride` is in elements, alignments in bytes.
    """
    size = BITS[source] // 8
    chunk = 16 if source == "e4m3" else 8
    load = math.gcd(ACCESS_BYTES // size, width, row_stride, max(alignment // size, 1))
    store = store_width(ACCESS_BYTES, rows, out_alignment) if transposed else (
        math.gcd(chunk, width, out_alignment)
    )  # fmt: skip
    lanes = 8 if transposed else 16
    rows_per_thread, blocks = ROWS_AND_BLOCKS[source if activation == NONE else activation]
    if activation != NONE and source == "float32":
        blocks -= 1  # its halves take twice the registers
    if load * size < ACCESS_BYTES or store < 8:
        blocks = 1  # many more accesses are in flight
    # Long runs of the output: a transposing grid walks down the rows, the other along them, unless
    # the other axis needs the grid's x, the only one without a limit.
    tiles_down, tiles_across = -(-rows // TILE_ROWS), -(-width // (ACROSS * chunk))
    rows_on_x = tiles_across <= MAX_BLOCKS_ON_Y if transposed else tiles_down > MAX_BLOCKS_ON_Y
    return Plan(
        source, activation, transposed, group, round_sf, gathered,
        scale_columns, packed, rows_per_thread, chunk, ACROSS,
        lanes, load, store, rows_on_x, blocks,
    )  # fmt: skip
