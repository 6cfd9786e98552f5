"""References of the operators on indices."""

from __future__ import annotations

import torch


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
