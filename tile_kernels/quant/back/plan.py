"""Tiles of the casts back to bfloat16 and float32. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.quant.storage import ACCESS_BITS, BITS, access
from tile_kernels.runtime.device import Device

THREADS = 256
MAX_ROWS = 4  # of a thread
BUSY = 2048  # threads that an SM holds


class Plan(NamedTuple):
    """A thread takes `chunk` neighbouring values of `rows` rows; `load` and `store` per access.

    `scales` neighbouring scales come with one load.
    """

    source: str
    out: str
    width: int
    block_rows: int
    block_channels: int
    sf_dtype: str
    has_factor: bool
    chunk: int
    rows: int
    load: int
    store: int
    scales: int


def plan(
    source: str,
    out: str,
    num_rows: int,
    width: int,
    block: tuple[int, int],
    sf_dtype: str,
    has_factor: bool,
    alignment: int,
    out_alignment: int,
    sf_alignment: int,
    device: Device,
) -> Plan:
    """16 bytes per store, so that those of neighbouring threads touch; loads as wide as follows."""
    max_values = 8 if source == "e5m6" else ACCESS_BITS // BITS[out]
    load = access(source, width, alignment, max_values)
    store = access(out, width, out_alignment, max_values)
    chunk = max(load, store)
    threads = num_rows * (width // chunk)
    rows = MAX_ROWS if threads >= MAX_ROWS * BUSY * device.num_sms else 1
    scales = math.gcd(chunk, 4, max(1, sf_alignment // 4)) if block[1] == 1 else 1
    return Plan(source, out, width, *block, sf_dtype, has_factor, chunk, rows, load, store, scales)
