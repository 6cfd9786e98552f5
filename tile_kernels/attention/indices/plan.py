"""Plan of the lists of rows that queries attend to. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

WARPS = 4  # of a block, a token each
UNROLLED = 8  # selected entries of a lane that are loaded before the first is used


class Plan(NamedTuple):
    """All sizes are dynamic."""

    with_selected: bool


def plan(with_selected: bool, device: Device) -> Plan:
    return Plan(with_selected)
