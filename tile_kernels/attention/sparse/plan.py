"""Plan of attention over chosen rows. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.attention.softmax_plan import Schedule, require_hopper
from tile_kernels.runtime.device import Device


class Plan(NamedTuple):
    """`width`: channels of a row. Numbers of tokens, heads, rows and indices are dynamic."""

    width: int
    with_sink: bool
    with_length: bool
    ahead: bool
    slack: int
    chunk: int
    early: bool
    cluster: int


# H200, 4096 queries, TFLOP/s with 128 heads and 1152 of 16384 rows, and with 64 heads and 640: this
# schedule 598 and 535; with `chunk=128` and `early` 540 and 454, then with `slack=8` 542 and 500
# and with `ahead` 516 and 475; with `early` alone 573 and 519. One block for each result instead
# of persistent ones: 486 and 426.
SCHEDULE = Schedule(ahead=False, slack=0, chunk=256, early=False)


def plan(width: int, with_sink: bool, with_length: bool, device: Device) -> Plan:
    require_hopper("sparse_attention", device)
    return Plan(width, with_sink, with_length, *SCHEDULE)
