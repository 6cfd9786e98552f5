"""Limits and grid of the histograms. Needs no TileLang.

Indices are cut into chunks of consecutive ones. A block counts one chunk in shared memory. The
mapping (`moe/mapping`) cuts and counts its indices likewise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import Device

MAX_GROUPS = 8192  # a histogram in the shared memory of the smallest supported GPU
MAX_CHUNKS = 128  # blocks, with one histogram each
THREADS = 512
BATCH = 4  # loads in flight per thread
INDICES_PER_CHUNK = BATCH * THREADS
MAX_VECTOR = 4  # counts of 16 bytes


def max_chunks(device: Device) -> int:
    """The most blocks to count with; few indices take fewer, which the launch computes."""
    return min(device.num_sms, MAX_CHUNKS)


def count_vector(num_groups: int) -> int:
    """Counts per access, 16 bytes if rows of counts are multiples of them."""
    return math.gcd(num_groups, MAX_VECTOR)


class Plan(NamedTuple):
    """`vector` counts of a block are read per access."""

    num_groups: int
    max_chunks: int
    as_fraction: bool
    vector: int


def plan(num_groups: int, as_fraction: bool, device: Device) -> Plan:
    return Plan(num_groups, max_chunks(device), as_fraction, count_vector(num_groups))
