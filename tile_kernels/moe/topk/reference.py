"""References of the selection of experts and of groups by their scores."""

from __future__ import annotations

import torch


def stable_topk(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Selects the `num_topk` largest scores of each row; ties go to the smaller index.

    NaN counts as the largest value; `+0.0` and `-0.0` are equal.

    Args:
        scores: `[num_tokens, num_experts]`, any sortable dtype.
        num_topk: The number of indices.

    Returns:
        `[num_tokens, min(num_topk, num_experts)]`, int64, contiguous.

    Example:
        >>> stable_topk(torch.tensor([[1.0, float("nan"), 3.0, 3.0]]), 3).tolist()
        [[1, 2, 3]]
    """
    num_topk = min(num_topk, scores.shape[1])
    if not scores.is_cpu:  # where looking for ties would wait for the result
        return _sorted_experts(scores)[:, :num_topk].clone(memory_format=torch.contiguous_format)
    # One score more than wanted: if they all differ, their order is the only one.
    values, order = scores.topk(min(num_topk + 1, scores.shape[1]), dim=1)
    order = order[:, :num_topk].clone(memory_format=torch.contiguous_format)
    tied = (~(values[:, :-1] > values[:, 1:])).any(1).nonzero()[:, 0]  # also where there is NaN
    order[tied] = _sorted_experts(scores[tied])[:, :num_topk]
    return order


def _sorted_experts(scores: torch.Tensor) -> torch.Tensor:
    return torch.sort(_with_one_nan(scores), dim=1, descending=True, stable=True).indices


def topk_sum_and_topk_group_idx(
    scores: torch.Tensor, num_group_sum_topk: int, num_topk_groups: int
) -> torch.Tensor:
    """Selects the best groups of each token by the sum of the largest scores of each group.

    Args:
        scores: `[num_tokens, num_groups, experts_per_group]`.
        num_group_sum_topk: The number of scores of a group that are added.
        num_topk_groups: The number of groups that are selected.

    Returns:
        `[num_tokens, num_topk_groups]`, int64, best first, ties to the smaller group.

    Example:
        >>> groups = torch.tensor([[[1.0, 5.0], [3.0, 3.0], [4.0, 1.0], [0.0, 7.0]]])
        >>> topk_sum_and_topk_group_idx(groups, 2, 4).tolist()
        [[3, 0, 1, 2]]
    """
    largest = _with_one_nan(scores).topk(num_group_sum_topk, dim=-1).values
    return stable_topk(largest.sum(dim=-1), num_topk_groups)


def _with_one_nan(scores: torch.Tensor) -> torch.Tensor:
    """CUDA's sort tells NaNs of different sign apart; here there is one NaN on every device."""
    if not scores.is_floating_point():
        return scores
    return scores.masked_fill(scores.isnan(), float("nan"))
