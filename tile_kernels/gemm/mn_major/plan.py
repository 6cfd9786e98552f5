"""Plan of the transposition of scales. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device


class Plan(NamedTuple):
    dtype: str
    batched: bool
    steps: int


def plan(dtype: str, batched: bool, steps: int, device: Device) -> Plan:
    return Plan(dtype, batched, steps)
