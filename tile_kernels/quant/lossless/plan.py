"""Tiles of the cast from e2m1 to e4m3. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.quant.per_block.plan import tile_of
from tile_kernels.quant.storage import access
from tile_kernels.runtime.device import Device

MAX_CHANNELS = 4096  # of a block: 16 for each thread
MAX_RATIO = 11  # of two scales in a block whose values are all exact, in powers of two
MAX_KEPT = 16  # rows that a thread holds in registers


class Plan(NamedTuple):
    """`in_rows x in_channels` share a scale of the source; `rows x channels` one of the result.

    `words`: memory is accessed in whole words, eight values of the source each.
    """

    width: int
    in_rows: int
    in_channels: int
    in_packed: bool
    rows: int
    channels: int
    chunk: int
    lanes: int
    team: int
    load: int
    store: int
    words: bool
    layout: str


def plan(
    width: int,
    in_block: tuple[int, int],
    in_packed: bool,
    out_block: tuple[int, int],
    layout: str,
    words: bool,
    alignment: int,
    out_alignment: int,
    device: Device,
) -> Plan:
    """16 values per thread and row: 8 bytes to load, 16 to store."""
    chunk = min(16, out_block[1])
    tile = tile_of(*out_block, chunk)
    load = access("e2m1", width, alignment, chunk)
    store = access("e4m3", width, out_alignment, chunk)
    return Plan(width, *in_block, in_packed, *tile, load, store, words, layout)
