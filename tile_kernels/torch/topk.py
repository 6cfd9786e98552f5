"""Oracles of the expert gates."""

from __future__ import annotations

import torch


def stable_topk(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """The indices of the `num_topk` largest scores of each row, ties to the smaller index.

    `scores` is `[num_tokens, num_experts]` of any sortable dtype. Returns int64
    `[num_tokens, min(num_topk, num_experts)]`, contiguous. NaN counts as the largest value;
    `+0.0` and `-0.0` are equal.

    >>> stable_topk(torch.tensor([[1.0, float("nan"), 3.0, 3.0]]), 3).tolist()
    [[1, 2, 3]]
    """
    if scores.is_floating_point():
        # CUDA's sort tells NaNs of different sign apart; here there is one NaN on every device.
        scores = scores.masked_fill(scores.isnan(), float("nan"))
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    return order[:, :num_topk].clone(memory_format=torch.contiguous_format)
