"""Oracles of the expert gates."""

from __future__ import annotations

import torch

from tile_kernels.torch.moe import mask_indices_by_tp
from tile_kernels.torch.scoring import ScoringFunc


def stable_topk(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """The indices of the `num_topk` largest scores of each row, ties to the smaller index.

    `scores` is `[num_tokens, num_experts]` of any sortable dtype. Returns int64
    `[num_tokens, min(num_topk, num_experts)]`, contiguous. NaN counts as the largest value;
    `+0.0` and `-0.0` are equal.

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
    """The best groups of each token, by the sum of each group's largest scores.

    `scores` is `[num_tokens, num_groups, experts_per_group]`. Returns int64
    `[num_tokens, num_topk_groups]`, best first, ties to the smaller group.

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


def gate_scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """The score of every expert, `[num_tokens, num_experts]`: see `ScoringFunc`.

    >>> gate_scores(torch.tensor([[0.0, 0.0]]), "softmax").tolist()
    [[0.5, 0.5]]
    """
    match ScoringFunc.from_str(scoring_func):
        case ScoringFunc.SIGMOID:
            return 1 / (1 + torch.exp(-logits))
        case ScoringFunc.SQRTSOFTPLUS:
            return torch.sqrt(torch.nn.functional.softplus(logits))
        case ScoringFunc.SOFTMAX:
            return torch.softmax(logits, dim=1)
    raise ValueError(f"{scoring_func} scores nothing; a gate needs another scoring function")


def _chosen_scores(logits: torch.Tensor, idx: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """`gate_scores` at `idx`; only those are computed, unless they depend on the whole row."""
    if ScoringFunc.from_str(scoring_func) is ScoringFunc.SOFTMAX:
        return gate_scores(logits, scoring_func).gather(1, idx)
    return gate_scores(logits.gather(1, idx), scoring_func)


def topk_weights(
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    scoring_func: str = "sigmoid",
    routed_scaling_factor: float = 1.0,
) -> torch.Tensor:
    """The weights of chosen experts: their scores over `1e-20` plus their sum, times a factor.

    `logits` `[num_tokens, num_experts]`, `topk_idx` int64 `[num_tokens, num_topk]`. The sum is
    taken in slot order. Slots outside `0..num_experts-1` get 0 and are not in the sum.

    >>> topk_weights(torch.zeros(1, 4), torch.tensor([[2, -1, 0]])).tolist()
    [[0.5, 0.0, 0.5]]
    """
    num_experts = logits.shape[1]
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    chosen = torch.where(valid, _chosen_scores(logits, topk_idx.where(valid, 0), scoring_func), 0)
    total = logits.new_full(logits.shape[:1], 1e-20)
    for column in chosen.unbind(1):
        total = total + column
    factor = torch.tensor(routed_scaling_factor, dtype=logits.dtype, device=logits.device)
    return torch.where(valid, chosen / total[:, None] * factor, 0)


def best_experts(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    scoring_func: str,
) -> torch.Tensor:
    """The selection of `top2_sum_gate`: the best experts of the best groups, best first."""
    num_tokens, num_experts = logits.shape
    softmax = ScoringFunc.from_str(scoring_func) is ScoringFunc.SOFTMAX
    ranks = (logits if softmax else gate_scores(logits, scoring_func)) + bias
    if num_groups == num_topk_groups:
        return stable_topk(ranks, num_topk)
    size = num_experts // num_groups
    groups = topk_sum_and_topk_group_idx(
        ranks.view(num_tokens, num_groups, size), min(2, size), num_topk_groups
    )
    # Kept groups in their order, so that ties among their experts go to the smaller index.
    experts = groups.sort(dim=1).values[:, :, None] * size + torch.arange(
        size, device=logits.device
    )
    experts = experts.flatten(1)
    return experts.gather(1, stable_topk(ranks.gather(1, experts), num_topk))


def top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(topk_idx, topk_weights)` of each token; see `tile_kernels.moe.top2_sum_gate`.

    >>> logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0]])
    >>> top2_sum_gate(logits, torch.zeros(8), 2, 0, 0, False, 0, 1.5, 0, 1, 0, 1, "sigmoid")
    (tensor([[3, 4]]), tensor([[0.7500, 0.7500]]))
    """
    num_tokens = logits.shape[0]
    num_shared = num_shared_experts if use_shared_as_routed else 0
    chosen = best_experts(logits, bias, num_topk, num_topk_groups, num_groups, scoring_func)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        chosen = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, chosen)
    weights = topk_weights(logits, chosen, scoring_func, routed_scaling_factor)
    routes = torch.ones(num_tokens, dtype=torch.bool, device=logits.device)
    if mask is not None:
        routes = mask.view(num_tokens)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(routes[:, None], chosen, -1))
    return placed(
        chosen, weights, routes, logits.shape[1], num_shared, to_physical_map, logical_count,
        ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
    )  # fmt: skip


def placed(
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
    replica = (ep_rank + token * 23333) % replicas.clamp(min=1)
    found = (idx >= 0) & (replicas >= 1) & (replica < physical.shape[1])
    return torch.where(found, physical[logical, replica.where(found, 0)], -1)


def topk_weights_backward(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    scoring_func: str,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """The gradient of `topk_weights` with respect to `logits`.

    With scores `s`, their sum `S` and the factor `c`, a weight is `c s / S`, so
    `ds = c (g - sum(g s) / S) / S`; then the derivative of the scoring function.
    """
    num_experts = logits.shape[1]
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    idx = topk_idx.where(valid, 0)
    logit = logits.gather(1, idx)
    scoring = ScoringFunc.from_str(scoring_func)
    scores = gate_scores(logits, scoring_func)
    chosen = torch.where(valid, scores.gather(1, idx), 0)
    total = 1e-20 + chosen.sum(1, keepdim=True)
    shared = (grad_weights * chosen).sum(1, keepdim=True) / total
    grad_score = torch.where(valid, routed_scaling_factor * (grad_weights - shared) / total, 0)
    grad = torch.zeros_like(logits)
    if scoring is ScoringFunc.SOFTMAX:
        grad.scatter_(1, idx, _sums_of_equal(grad_score, idx))
        of_logits = scores * (grad - (grad_score * chosen).sum(1, keepdim=True))
        return torch.where(valid.any(1, keepdim=True), of_logits, 0)  # also where scores are NaN
    if scoring is ScoringFunc.SIGMOID:
        slope = torch.sigmoid(logit) * torch.sigmoid(-logit)
    else:  # sigmoid(x) / (2 score), which is 0/0 far below zero
        slope = torch.where(
            logit < -80, torch.exp(logit / 2) / 2, torch.sigmoid(logit) / (2 * chosen)
        )
    of_slots = torch.where(valid, grad_score * slope, 0)
    return grad.scatter_(1, idx, _sums_of_equal(of_slots, idx))


def _sums_of_equal(values: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """For each slot the sum of all values under its index, always in the same order.

    Adding them while scattering would leave the order to the GPU.
    """
    equal = idx[:, :, None] == idx[:, None, :]
    return torch.where(equal, values[:, None, :], 0).sum(2)
