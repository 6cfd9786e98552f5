"""Plan of attention over windows and all entries. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.attention.softmax_plan import Schedule, require_hopper
from tile_kernels.runtime.device import Device

BLOCK_HEADS = 64
# H200, 8192 queries in one sequence, 128 heads, ratio 1: 573 TFLOP/s with clusters of two blocks,
# 552 without. Other chunks and orders were not measured here.
SCHEDULE = Schedule(ahead=False, slack=0, chunk=128, early=True)


class Plan(NamedTuple):
    """`width`: channels of a row. Numbers of tokens, heads, entries, the window and the ratio are
    dynamic."""

    width: int
    with_entries: bool
    with_sink: bool
    ahead: bool
    slack: int
    chunk: int
    early: bool
    cluster: int


def plan(width: int, with_entries: bool, with_sink: bool, heads: int, device: Device) -> Plan:
    """Two blocks of 64 heads of a query are a cluster: they receive the same rows by one copy."""
    require_hopper("hca_attention", device)
    schedule = SCHEDULE._replace(cluster=2 if heads > BLOCK_HEADS else 1)
    return Plan(width, with_entries, with_sink, *schedule)
