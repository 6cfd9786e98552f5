"""Plan of the indexer's target. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.attention.softmax_plan import require_hopper
from tile_kernels.runtime.device import Device

MAX_HEADS = 128  # of a pass: the columns of a product


class Plan(NamedTuple):
    """`columns`: heads of a pass, rounded up."""

    dim: int
    heads: int
    columns: int
    normalize: bool


def plan(dim: int, heads: int, normalize: bool, device: Device) -> Plan:
    require_hopper("attention_target", device)
    return Plan(dim, heads, 64 if heads <= 64 else MAX_HEADS, normalize)
