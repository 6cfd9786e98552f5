"""What the references of the gates share: from chosen experts to the numbers of a rank."""

from __future__ import annotations

import torch

from tile_kernels.moe.indices.reference import mask_indices_by_tp
from tile_kernels.moe.plan import REPLICA_STEP


def to_local_experts(
    chosen: torch.Tensor,
    weights: torch.Tensor,
    routes: torch.Tensor,
    num_routed: int,
    num_shared: int,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gate's results from its choice: shared experts appended, replicas taken, ranks counted.

    Tokens where `routes` is False have no expert.
    """
    num_tokens = chosen.shape[0]
    shared = torch.arange(num_routed, num_routed + num_shared, device=chosen.device)
    idx = torch.cat([chosen.where(chosen < num_routed, -1), shared.expand(num_tokens, -1)], dim=1)
    weights = torch.cat([weights, weights.new_ones(num_tokens, num_shared)], dim=1)
    extra = 0
    if to_physical_map is not None and logical_count is not None:
        extra = to_physical_map.shape[1] - 1
        idx = _physical(idx, to_physical_map.long(), logical_count.long(), ep_rank)
    idx = mask_indices_by_tp(idx, num_routed + extra, num_ep_ranks, tp_rank, num_tp_ranks)
    return torch.where(routes[:, None], idx, -1), torch.where(routes[:, None], weights, 0)


def _physical(
    idx: torch.Tensor, physical: torch.Tensor, count: torch.Tensor, ep_rank: int
) -> torch.Tensor:
    """Logical to physical experts: tokens take turns among the replicas of an expert.

    Without replicas (a count below 1, or a replica beyond the map) there is no expert: -1.
    """
    token = torch.arange(idx.shape[0], device=idx.device)[:, None]
    logical = idx.clamp(min=0)
    replicas = count[logical]
    replica = (ep_rank + token * REPLICA_STEP) % replicas.clamp(min=1)
    found = (idx >= 0) & (replicas >= 1) & (replica < physical.shape[1])
    return torch.where(found, physical[logical, replica.where(found, 0)], -1)
