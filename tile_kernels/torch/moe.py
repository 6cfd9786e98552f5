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
