"""Plan of the split into bfloat16 parts. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import Device

THREADS = 256


class Plan(NamedTuple):
    columns: int
    parts: str  # their digits, in order
    vector: int


def plan(columns: int, parts: str, alignment: int, device: Device) -> Plan:
    """Up to four values at a time: 16 bytes of float32."""
    return Plan(columns, parts, math.gcd(columns, 4, max(alignment // 4, 1)))
