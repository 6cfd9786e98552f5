"""Tile sizes of the copies to all streams and of their gradient. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.mhc.tiling import access, columns_of, cut_row
from tile_kernels.runtime.device import Device


class Plan(NamedTuple):
    """`vector` columns per access; a row is cut into `parts`, see `tiling.Cut`."""

    streams: int
    hidden: int
    vector: int
    threads: int
    parts: int


def plan(streams: int, hidden: int, num_tokens: int, alignment: int, device: Device) -> Plan:
    vector = access(columns_of(hidden), 2, alignment)
    return Plan(streams, hidden, vector, *cut_row(hidden, num_tokens, device))
