"""Limits and vector widths of the kernels on expert indices. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.plan import ACCESS_BYTES
from tile_kernels.runtime.device import Device

MAX_UNIQUE_COLUMNS = 64  # a row in the registers of one thread
WIDTHS = {"int32": 4, "int64": 8}


class MaskPlan(NamedTuple):
    dtype: str
    per_rank: int
    num_tp_ranks: int
    vector: int
    threads: int


def plan_mask(
    dtype: str,
    per_rank: int,
    num_tp_ranks: int,
    num_topk: int,
    num_indices: int,
    alignment: int,
    device: Device,
) -> MaskPlan:
    """The divisors are static, so that the compiler turns the divisions into multiplications."""
    width = WIDTHS[dtype]
    vector = math.gcd(ACCESS_BYTES // width, num_indices, max(alignment // width, 1))
    return MaskPlan(dtype, per_rank, num_tp_ranks, vector, threads=128)


class UniquePlan(NamedTuple):
    num_topk: int
    vector: int
    threads: int


def plan_unique(num_topk: int, alignment: int, device: Device) -> UniquePlan:
    return UniquePlan(num_topk, math.gcd(2, num_topk, max(alignment // 8, 1)), threads=128)
