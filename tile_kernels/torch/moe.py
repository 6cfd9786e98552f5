"""Oracles of the routing operators."""

from __future__ import annotations

import torch


def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row over its sum: `(denominator [num_tokens], normalized [num_tokens, num_topk])`.

    The sum starts at `1e-20` and adds the columns in order, each step rounded to float32.

    >>> normalize_weight(torch.tensor([[1.0, 2.0, 3.0, 2.0]]))[1].tolist()
    [[0.125, 0.25, 0.375, 0.25]]
    """
    denominator = topk_weights.new_full((topk_weights.shape[0],), 1e-20)
    for column in topk_weights.unbind(1):
        denominator = denominator + column
    return denominator, topk_weights / denominator[:, None]


def mask_indices_by_tp(
    indices: torch.Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> torch.Tensor:
    """Expert indices as one tensor-parallel rank counts them, -1 for the experts of other ranks.

    `indices` is an integer tensor of any shape; `n` experts lie on `num_ep_ranks` ranks, of which
    every `num_tp_ranks`-th belongs to `tp_rank`. Negative indices stay -1.

    >>> mask_indices_by_tp(torch.tensor([-1, 0, 3, 4, 8]), 24, 6, 0, 2).tolist()
    [-1, 0, 3, -1, 4]
    """
    per_rank = n // num_ep_ranks
    rank = indices.div(per_rank, rounding_mode="floor")
    local = rank.div(num_tp_ranks, rounding_mode="floor") * per_rank + indices.remainder(per_rank)
    mine = (indices >= 0) & (rank.remainder(num_tp_ranks) == tp_rank)
    return torch.where(mine, local, -1)


def group_count(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """How often each of `num_groups` groups stands in `group_idx`: int32 `[num_groups]`.

    Entries outside `0..num_groups-1` are not counted.

    >>> group_count(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4).tolist()
    [1, 3, 1, 0]
    """
    counted = group_idx[(group_idx >= 0) & (group_idx < num_groups)]
    return torch.bincount(counted, minlength=num_groups).to(torch.int32)


def aux_fi(topk_idx: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """`count * num_experts / (num_tokens * num_aux_topk)` for each expert: float32 `[num_experts]`.

    >>> aux_fi(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4, 2)[3].item()
    0.0
    """
    counts = group_count(topk_idx, num_experts).float()
    if topk_idx.numel() == 0:
        return counts
    slots = torch.tensor(
        topk_idx.shape[0] * num_aux_topk, dtype=torch.float32, device=topk_idx.device
    )
    return counts * num_experts / slots


def inplace_unique_group_indices(group_indices: torch.Tensor, num_groups: int) -> None:  # noqa: ARG001
    """In each row of `group_indices`, later repeats of an index become -1, in place.

    >>> rows = torch.tensor([[3, 1, 3, -1, 1, 3]])
    >>> inplace_unique_group_indices(rows, 128)
    >>> rows.tolist()
    [[3, 1, -1, -1, -1, -1]]
    """
    ordered, order = torch.sort(group_indices, dim=1, stable=True)
    repeats = torch.zeros_like(ordered, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    group_indices.masked_fill_(torch.zeros_like(repeats).scatter_(1, order, repeats), -1)
