"""Plans of the kernels that turn projections into mixes. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.mhc.tiling import access
from tile_kernels.runtime.device import Device

MAX_CHUNKS = 512  # blocks of the gradient; each has partial sums over its tokens


class Plan(NamedTuple):
    """`vector` mixes per thread and access."""

    streams: int
    head: bool
    vector: int


def plan(streams: int, head: bool, alignment: int, device: Device) -> Plan:
    return Plan(streams, head, access(streams, 4, alignment))
