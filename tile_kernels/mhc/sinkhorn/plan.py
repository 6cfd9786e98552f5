"""Plans of the Sinkhorn normalization. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.mhc.tiling import access
from tile_kernels.runtime.device import Device

MAX_REPEAT = 2**20


class Plan(NamedTuple):
    """`vector` elements per access; `near` as in `is_near`."""

    size: int
    vector: int
    near: bool


def plan(size: int, alignment: int, near: bool, device: Device) -> Plan:
    return Plan(size, access(size, 4, alignment), near)


def is_near(eps: float) -> bool:
    """Whether no divisor and no quotient can overflow, underflow or come near."""
    return 1e-20 <= eps <= 1.0
