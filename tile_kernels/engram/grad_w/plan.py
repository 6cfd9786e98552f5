"""Plan of the sums of partial gradients. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import WARP, Device

AT_ONCE = (1, 3, 6, 9, 12)  # parts that a thread reads at once
FEW_AT_ONCE, MAX_AT_ONCE = AT_ONCE[-2:]
FEW_PARTS = 8
MIN_WARPS, MAX_WARPS = 4, 16  # of a block; fewer may have parts
MAX_GRID_WARPS = 4096  # enough for any device


class Split(NamedTuple):
    """Each of `warps` adds up a share of the parts, `at_once` at a time."""

    warps: int
    at_once: int


def split(columns: int, parts: int, vector: int) -> Split:
    """More warps for fewer columns and for more parts; the SM budget does not count.

    The order of the sums follows from it. A launch gets it as arguments.
    """
    blocks = max(1, -(-columns // (WARP * vector)))
    warps = max(1, min(MAX_WARPS, -(-parts // FEW_PARTS), MAX_GRID_WARPS // blocks))
    warps = 1 << (warps.bit_length() - 1)
    steps = max(1, -(-parts // (warps * MAX_AT_ONCE)))
    at_once = -(-parts // (warps * steps))
    return Split(warps, next(n for n in AT_ONCE if n >= at_once))


class Plan(NamedTuple):
    """`warps` of a block, and the most parts that a thread reads at once; `split` may use fewer."""

    dtype: str
    vector: int
    warps: int
    max_at_once: int


def plan(dtype: str, columns: int, parts: int, vector: int, device: Device) -> Plan:
    """Four kernels for any number of parts: 4, 8 or 16 warps, and fewer registers for 16.

    With up to 9 parts at once, two blocks of 16 warps fit in the registers of a multiprocessor.
    """
    shares = split(columns, parts, vector)
    few = shares.warps == MAX_WARPS and shares.at_once <= FEW_AT_ONCE
    return Plan(dtype, vector, max(MIN_WARPS, shares.warps), FEW_AT_ONCE if few else MAX_AT_ONCE)
