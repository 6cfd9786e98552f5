"""Limits and variants of the top-k kernels. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.moe.plan import MAX_SLOTS, row_vector
from tile_kernels.runtime.device import Device
from tile_kernels.utils import next_power_of_two

MAX_EXPERTS = 8192  # one row of sort keys in the shared memory of the smallest supported GPU
MAX_WARP_EXPERTS = 512  # beyond that several warps share a token
MAX_WARP_TOPK = MAX_SLOTS  # one pick per lane
WIDE_PER_LANE = 16
# H200, 8192 x 4096, to choose 64 and 2048: 16 keys 251 and 610 us, 8 keys 311 and 720, 4 keys 433
# and 840.
KEYS_PER_THREAD = 16


class WarpPlan(NamedTuple):
    num_experts: int
    num_topk: int
    vector: int
    warps: int


def plan_warp(num_experts: int, num_topk: int, alignment: int, device: Device) -> WarpPlan:
    return WarpPlan(num_experts, num_topk, row_vector(num_experts, alignment), warps=4)


class WidePlan(NamedTuple):
    num_experts: int
    num_topk: int
    vector: int


def plan_wide(num_experts: int, num_topk: int, alignment: int, device: Device) -> WidePlan:
    return WidePlan(num_experts, num_topk, row_vector(num_experts, alignment))


class BlockPlan(NamedTuple):
    num_experts: int
    num_topk: int
    threads: int


def plan_block(num_experts: int, num_topk: int, alignment: int, device: Device) -> BlockPlan:
    threads = min(1024, max(32, next_power_of_two(num_experts) // 2))
    return BlockPlan(num_experts, num_topk, threads)


def plan_select(num_experts: int, num_topk: int, alignment: int, device: Device) -> BlockPlan:
    """About 16 keys of a thread, which are compared between two barriers."""
    threads = min(1024, max(64, next_power_of_two(-(-num_experts // KEYS_PER_THREAD))))
    return BlockPlan(num_experts, num_topk, threads)


class GroupPlan(NamedTuple):
    num_groups: int
    group_size: int
    num_topk_sum: int
    num_topk_groups: int
    vector: int
    warps: int


def plan_groups(
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    alignment: int,
    device: Device,
) -> GroupPlan:
    vector = row_vector(group_size, alignment)
    return GroupPlan(num_groups, group_size, num_topk_sum, num_topk_groups, vector, warps=4)
