"""Plan of the product of weights. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

THREADS = 256
BITS = {"bfloat16": 16, "float32": 32}  # of one weight


class Plan(NamedTuple):
    dtype: str
    vector: int


def plan(dtype: str, vector: int, device: Device) -> Plan:
    return Plan(dtype, vector)
