"""Limits and grid of the mapping. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.moe.count.plan import THREADS, count_vector, max_chunks
from tile_kernels.runtime.device import WARP, Device

MAX_NUMBERS = 2**31 - 2**20  # results in all, counted in 32 bits, as are slots past the end
MAX_EXPERTS = 8192  # three counters for each in the shared memory of the smallest supported GPU
WARPS = THREADS // WARP
SHARED_BYTES = 96 * 1024  # what every supported GPU gives a block


class Plan(NamedTuple):
    num_topk: int
    num_experts: int
    max_chunks: int
    placing_warps: int  # each has counters for every expert
    vector: int  # counts of a block per access


def plan(num_topk: int, num_experts: int, device: Device) -> Plan:
    counters = SHARED_BYTES // (4 * num_experts) - 2
    placing_warps = min(WARPS, 1 << counters.bit_length() - 1)
    vector = count_vector(num_experts)
    return Plan(num_topk, num_experts, max_chunks(device), placing_warps, vector)
