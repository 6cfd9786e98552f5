"""Plan of the sums of partial gradients. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import WARP, Device

AT_ONCE = (1, 3, 6, 9, 12)  # parts that a thread reads at once
FEW_PARTS, MAX_PARTS = 8, AT_ONCE[-1]
MAX_WARPS = 16
MAX_GRID_WARPS = 4096  # enough for any device


class Plan(NamedTuple):
    """Each warp of a block adds up a share of the parts, `at_once` at a time, for some columns."""

    dtype: str
    vector: int
    warps: int
    at_once: int


def plan(dtype: str, columns: int, parts: int, vector: int, device: Device) -> Plan:
    """More warps for fewer columns and for more parts; the SM budget does not count."""
    blocks = max(1, -(-columns // (WARP * vector)))
    warps = max(1, min(MAX_WARPS, -(-parts // FEW_PARTS), MAX_GRID_WARPS // blocks))
    warps = 1 << (warps.bit_length() - 1)
    steps = max(1, -(-parts // (warps * MAX_PARTS)))
    at_once = -(-parts // (warps * steps))
    return Plan(dtype, vector, warps, next(n for n in AT_ONCE if n >= at_once))
