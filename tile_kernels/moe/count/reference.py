"""Reference of `group_count`."""

from __future__ import annotations

import torch


def group_count(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """How often each of `num_groups` groups stands in `group_idx`: int32 `[num_groups]`.

    Entries outside `0..num_groups-1` are not counted.

    >>> group_count(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4).tolist()
    [1, 3, 1, 0]
    """
    counted = group_idx[(group_idx >= 0) & (group_idx < num_groups)]
    return torch.bincount(counted, minlength=num_groups).to(torch.int32)
