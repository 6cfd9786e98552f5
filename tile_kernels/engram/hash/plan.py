"""Plan of the hash of n-grams. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

THREADS = 128


class Plan(NamedTuple):
    window: int
    tables: int
    dtype: str
    masked: bool


def plan(window: int, tables: int, dtype: str, masked: bool, device: Device) -> Plan:
    return Plan(window, tables, dtype, masked)
