"""Limits and tiling of the scored gate. Needs no TileLang."""

from __future__ import annotations

from tile_kernels.moe.plan import Gate, row_vector
from tile_kernels.runtime.device import WARP, Device

MAX_EXPERTS = 16384  # 512 for each warp of a block
MAX_PER_LANE = 16  # keys that a lane sorts in registers
PER_WARP = WARP * MAX_PER_LANE


def plan(
    num_experts: int,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    num_shared: int,
    scoring: int,
    has_mask: bool,
    has_fixed: bool,
    has_map: bool,
    has_unmapped: bool,
    alignment: int,
    device: Device,
) -> Gate:
    vector = row_vector(num_experts // max(num_groups, 1), alignment)
    return Gate(
        num_experts, num_topk, num_groups, num_topk_groups, num_shared, scoring,
        has_mask, has_fixed, has_map, has_unmapped, vector,
    )  # fmt: skip


def lanes_per_group(gate: Gate) -> int:
    """Neighbouring lanes that share a group, where a warp has lanes for all of them."""
    return 1 << (WARP // gate.num_groups).bit_length() - 1


def keys_per_lane(gate: Gate) -> int:
    """Keys of a lane if one warp serves a token."""
    if gate.num_groups == 0:
        return -(-gate.num_experts // (WARP * gate.vector)) * gate.vector
    group_size = gate.num_experts // gate.num_groups
    return -(-group_size // (lanes_per_group(gate) * gate.vector)) * gate.vector
