"""Reference of `top2_sum_gate`."""

from __future__ import annotations

import torch

from tile_kernels.moe.placement import to_local_experts
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk.reference import stable_topk, topk_sum_and_topk_group_idx
from tile_kernels.moe.weight.reference import gate_scores, topk_weights


def best_experts(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    scoring_func: str,
) -> torch.Tensor:
    """The selection of `top2_sum_gate`: the best experts of the best groups, best first.

    Args:
        logits: `[num_tokens, num_experts]`, float32.
        bias: `[num_experts]`, float32.
        num_topk: As in `top2_sum_gate`.
        num_topk_groups: As in `top2_sum_gate`.
        num_groups: As in `top2_sum_gate`.
        scoring_func: As in `top2_sum_gate`.

    Returns:
        `[num_tokens, num_topk]`, int64.
    """
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
    return to_local_experts(
        chosen, weights, routes, logits.shape[1], num_shared, to_physical_map, logical_count,
        ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
    )  # fmt: skip
