"""Plan of the cast without scales. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import Device

BITS = {"float32": 32, "bfloat16": 16, "float8_e4m3fn": 8}
CHUNK = 8  # values of a thread, those of one counter of the generator
THREADS = 256


class Plan(NamedTuple):
    """`load` and `store` are values per access."""

    source: str
    target: str
    rounding: str
    load: int
    store: int


def plan(
    source: str, target: str, rounding: str, alignment: int, out_alignment: int, device: Device
) -> Plan:
    load = math.gcd(CHUNK, 128 // BITS[source], max(1, 8 * alignment // BITS[source]))
    store = math.gcd(CHUNK, 128 // BITS[target], max(1, 8 * out_alignment // BITS[target]))
    return Plan(source, target, rounding, load, store)
