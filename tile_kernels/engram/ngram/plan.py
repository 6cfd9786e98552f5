"""Plan of the n-gram windows. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

THREADS = 128


class Plan(NamedTuple):
    dtype: str
    window: int
    starts_dtype: str
    map_dtype: str


def plan(dtype: str, window: int, starts_dtype: str, map_dtype: str, device: Device) -> Plan:
    """`starts_dtype` and `map_dtype` are empty without document starts or map."""
    return Plan(dtype, window, starts_dtype, map_dtype)
