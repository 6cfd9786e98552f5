"""Plan of the choice among logits. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.attention.indexer_plan import list_entries
from tile_kernels.runtime.device import Device

THREADS = 512
UNIT = 4  # logits one after the other that a thread has
UNITS = 2  # of a thread in a tile
OWN = UNIT * UNITS
TILE = THREADS * OWN
PART = 32 * THREADS  # entries of a row that a block has in registers, where blocks share a row
SPARE_LIST = 1024  # entries of a list beside the best and a tile: with fewer it fills up more often


class Plan(NamedTuple):
    """`capacity`: entries of the list, with room for a tile and more beside the best.

    `vector`: logits that are read at once.
    """

    topk: int
    dtype: str
    vector: int
    with_start: bool
    by_value: bool
    capacity: int


def plan(
    topk: int,
    dtype: str,
    size: int,
    columns: int,
    stride: int,
    alignment: int,
    with_start: bool,
    by_value: bool,
    device: Device,
) -> Plan:
    """As many logits at once as the start and the end of each row allow, up to 4.

    `size` and `alignment` are bytes of a logit and of the address; `columns` and `stride` are those
    of a row, in logits.
    """
    vector = min(4, math.gcd(alignment, stride * size, columns * size) // size)
    capacity = THREADS * list_entries(topk + TILE + SPARE_LIST, THREADS)
    return Plan(topk, dtype, vector, with_start, by_value, capacity)


class PartPlan(NamedTuple):
    """`vector`: logits or keys that are read at once."""

    topk: int
    dtype: str
    vector: int


def plan_parts(topk: int, dtype: str, aligned: bool, device: Device) -> PartPlan:
    """The same on every device. `aligned`: every fourth entry of a row is at 16 bytes."""
    return PartPlan(topk, dtype, 4 if aligned else 1)
