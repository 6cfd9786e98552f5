"""Tiles of the casts with scales along rows. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.quant.storage import (
    ARITHMETIC,
    CAST,
    FAKE,
    GROUPS,
    LANES,
    NEAREST,
    access,
    e2m1_conversion,
    threads_of_row,
)
from tile_kernels.runtime.device import Device

WARPS = 4
CHUNKS = {"e4m3": 16, "e2m1": 32, "e5m6": 8}  # neighbouring values of a thread
BLOCKS_PER_SM = 6  # of cast_groups: else the compiler takes registers that loads in flight need
RESIDENT = 896  # threads per multiprocessor that registers are shared out for, of e5m6
MAX_KEPT = 64  # values of a row that a thread holds in registers


class Plan(NamedTuple):
    """`chunk` neighbouring values per thread; `load` and `store` of them per access."""

    source: str
    fmt: str
    width: int
    group: int
    chunk: int
    load: int
    store: int
    layout: str
    round_sf: bool
    task: str
    source_rows: int  # the scale blocks of a quantized source
    source_columns: int
    source_scales: str  # their dtype, empty without any
    has_factor: bool  # of all scales
    rounding: str
    threads: int
    conversion: str  # the conversion to e2m1


def is_whole(fmt: str, width: int, group: int) -> bool:
    """Whether a block takes a whole row, which has one scale, and not warps its groups."""
    return fmt == "e5m6" or (group == width and group not in GROUPS)


def plan(
    source: str,
    fmt: str,
    width: int,
    group: int,
    layout: str,
    round_sf: bool,
    task: str,
    block: tuple[int, int],
    source_scales: str,
    has_factor: bool,
    rounding: str,
    alignment: int,
    out_alignment: int,
    device: Device,
) -> Plan:
    """16 bytes of e4m3 or e2m1 per thread; three words of e5m6, which meet in shared memory.

    What comes back is as wide as what goes in, so 16 bytes of that.
    """
    chunk = 8 if task == FAKE else CHUNKS[fmt]
    load = access(source, width, alignment, chunk)
    target = source if task == FAKE else fmt
    store = access(target, width, out_alignment, 32 if target == "e5m6" else chunk)
    threads = WARPS * LANES
    if is_whole(fmt, width, group):
        threads = threads_of_row(width, chunk, MAX_KEPT)
    # Powers of two times bfloat16.
    exact = source == "bfloat16" and round_sf and task == CAST and store % 8 == 0
    conversion = e2m1_conversion(fmt, exact, device) if rounding == NEAREST else ARITHMETIC
    return Plan(
        source, fmt, width, group, chunk, load, store, layout, round_sf, task, *block,
        source_scales, has_factor, rounding, threads, conversion,
    )  # fmt: skip
