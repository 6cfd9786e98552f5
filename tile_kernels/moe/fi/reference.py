"""Reference of `aux_fi`."""

from __future__ import annotations

import torch

from tile_kernels.moe.count.reference import group_count


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
