"""Plans of the operators on paged key-value caches. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

ROWS_PER_BLOCK = 4  # a warp has a row; other numbers were not compared
INDEX_THREADS = 256  # of `cache_indices`; other numbers were not compared


class Plan(NamedTuple):
    layout: str
    cast: bool = False


def plan_append(layout: str, cast: bool, device: Device) -> Plan:
    return Plan(layout, cast)


def plan_gather(layout: str, device: Device) -> tuple[str]:
    return (layout,)


def plan_indices(device: Device) -> tuple[int]:
    return (INDEX_THREADS,)
