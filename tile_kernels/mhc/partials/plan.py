"""Plans of the sums of partial products. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

THREADS = 128


class Plan(NamedTuple):
    """`groups` of channels with a norm each, `mixes`, channels of a group."""

    groups: int
    mixes: int
    size: int


def plan(groups: int, mixes: int, size: int, device: Device) -> Plan:
    return Plan(groups, mixes, size)
