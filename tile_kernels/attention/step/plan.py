"""Plan of the step that appends tokens to states. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

MAX_THREADS = 256


class Plan(NamedTuple):
    channels: int
    window: int
    series: int
    slotted: bool
    dtype: str
    vector: int


def plan(
    channels: int, window: int, series: int, slotted: bool, dtype: str, vector: int, device: Device
) -> Plan:
    return Plan(channels, window, series, slotted, dtype, vector)
