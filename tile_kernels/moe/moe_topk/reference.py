"""References of the gate with image bias and of its gradient."""

from __future__ import annotations

import torch

from tile_kernels.moe.placement import to_local_experts
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk.reference import stable_topk
from tile_kernels.moe.weight.reference import gate_scores, topk_weights
from tile_kernels.runtime.philox import philox, uniform


def random_experts(
    num_tokens: int, num_slots: int, experts: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct random experts of `0..experts-1` for each token, and weights in `(0, 1]`.

    Slot `j` of token `t` takes the first two words of sequence `32 t + j` of Philox: the weight,
    and its exchange in a Fisher-Yates shuffle of all experts. Slots beyond the experts are -1, 0.

    >>> random_experts(1, 3, torch.tensor(3), 0)[0].sort().values
    tensor([[0, 1, 2]])
    """
    device = experts.device
    token = torch.arange(num_tokens, device=device)[:, None]
    slot = torch.arange(num_slots, device=device)
    words = philox(seed, token * MAX_SLOTS + slot)
    left = (experts - slot).clamp(min=1)
    # The high word of a product of two words, without the 64th bit.
    exchange = slot + ((words[1] >> 16) * left + ((words[1] & 0xFFFF) * left >> 16) >> 16)
    # Positions that were not exchanged hold their own number: no list of all experts is needed.
    positions: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    for j in range(num_slots):
        at = exchange[:, j]
        picked, moved = at, torch.full_like(at, j)
        for position, value in zip(positions, values):  # the last exchange with a position counts
            picked = torch.where(position == at, value, picked)
            moved = torch.where(position == j, value, moved)
        positions.append(at)
        values.append(moved)
        chosen.append(picked)
    exists = slot < experts
    idx = torch.where(exists, torch.stack(chosen, 1), -1)
    return idx, torch.where(exists, uniform(words[0]), 0.0)


def biases(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    image_bias: torch.Tensor | None,
    image_token_mask: torch.Tensor | None,
) -> torch.Tensor:
    """What is added to the scores of each token for ranking."""
    offset = logits.new_zeros(()) if bias is None else bias
    if image_bias is None or image_token_mask is None:
        return offset
    return torch.where(image_token_mask[:, None], image_bias, offset)


def moe_topk_gate_forward(
    logits: torch.Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    image_bias: torch.Tensor | None = None,
    image_token_mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    force_random: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.int64,
    with_scores: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`(topk_idx, topk_weights)`; see `tile_kernels.moe.moe_topk_gate_forward`.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    >>> moe_topk_gate_forward(logits, 2, False, 0, 1.5, 0)
    (tensor([[2, 3]]), tensor([[0.7500, 0.7500]]))
    """
    num_tokens, num_experts = logits.shape
    num_shared = num_shared_experts if use_shared_as_routed else 0
    all_scores = gate_scores(logits, scoring_func)
    softmax = ScoringFunc.from_str(scoring_func) is ScoringFunc.SOFTMAX
    ranks = (logits if softmax else all_scores) + biases(logits, bias, image_bias, image_token_mask)
    chosen = stable_topk(ranks, num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        chosen = torch.where(fix_routing_mask[:, None], unmapped_topk_idx.long(), chosen)
    weights = topk_weights(logits, chosen, scoring_func, routed_scaling_factor)
    routes = torch.ones(num_tokens, dtype=torch.bool, device=logits.device)
    if mask is not None:
        routes = mask.view(num_tokens)
    drawn = None
    if force_random is not None:
        drawn = routes & force_random
        routes = routes & ~force_random
    idx, weights = to_local_experts(
        chosen, weights, routes, num_experts, num_shared, to_physical_map, logical_count,
        ep_rank, 1, 0, 1,
    )  # fmt: skip
    if drawn is not None:
        experts = torch.tensor(num_experts + num_shared, device=logits.device)
        if logical_count is not None:
            experts = logical_count.clamp(min=0).sum()
        random_idx, random_weights = random_experts(num_tokens, idx.shape[1], experts, ep_rank)
        idx = torch.where(drawn[:, None], random_idx, idx)
        weights = torch.where(drawn[:, None], random_weights, weights)
    routed_scores = torch.where(routes[:, None], all_scores, 0.0)
    if scores is not None:
        scores.copy_(routed_scores)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(routes[:, None], chosen, -1))
    idx = idx.to(out_dtype)
    return (idx, weights, routed_scores) if with_scores else (idx, weights)


def _slopes(scores: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """The derivative of each score by its logit, from the score; not for softmax."""
    if ScoringFunc.from_str(scoring_func) is ScoringFunc.SIGMOID:
        return scores * (1 - scores)
    slope = -torch.expm1(-scores * scores) / (2 * scores)
    return torch.where(scores < 2.0**-12, scores / 2, slope)


def moe_topk_gate_backward(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    grad_topk_weights: torch.Tensor,
    routed_scaling_factor: float,
    scoring_func: str = "sqrtsoftplus",
    mask: torch.Tensor | None = None,
    grad_scores_sum: torch.Tensor | None = None,
    *,
    grad_scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits, in float64 inside; see `tile_kernels.moe.moe_topk_gate_backward`.

    >>> scores, idx = torch.full((1, 3), 0.5), torch.tensor([[0, 1]])
    >>> weights, grad = torch.full((1, 2), 0.5), torch.tensor([[1.0, 0.0]])
    >>> moe_topk_gate_backward(scores, idx, weights, grad, 1.0, "sigmoid")
    tensor([[ 0.1250, -0.1250,  0.0000]])
    """
    num_tokens, num_experts = scores.shape
    u = scores.double()
    valid = (topk_idx >= 0) & (topk_idx < num_experts)
    idx = topk_idx.long().where(valid, 0)
    incoming = torch.where(valid, grad_topk_weights.double(), 0)
    chosen = torch.where(valid, u.gather(1, idx), 0)
    total = 1e-20 + chosen.sum(1, keepdim=True)
    common = torch.where(valid, incoming * topk_weights.double(), 0).sum(1, keepdim=True)
    slot_grads = torch.where(valid, (routed_scaling_factor * incoming - common) / total, 0)
    equal = idx[:, :, None] == idx[:, None, :]  # repeated experts add up, in a fixed order
    sums = torch.where(equal, slot_grads[:, None, :], 0).sum(2)
    grad = torch.zeros_like(u).scatter_(1, idx, sums)
    if grad_scores_sum is not None and num_tokens:
        per_sequence = num_tokens // len(grad_scores_sum)
        h = grad_scores_sum.double().repeat_interleave(per_sequence, dim=0)
        row_sum = u.sum(1, keepdim=True)
        inverse = torch.where(row_sum == 0, 0, 1 / row_sum)
        grad = grad + (h - (h * u).sum(1, keepdim=True) * inverse) * inverse
    if grad_scores is not None:
        grad = grad + grad_scores.double()
    if ScoringFunc.from_str(scoring_func) is ScoringFunc.SOFTMAX:
        grad = u * (grad - (grad * u).sum(1, keepdim=True))
    else:
        slope = _slopes(u, scoring_func)
        if grad_scores_sum is None and grad_scores is None:  # NaN among the other scores is ignored
            columns = torch.arange(num_experts, device=idx.device)
            is_chosen = (idx.where(valid, -1)[:, :, None] == columns).any(1)
            slope = slope.where(is_chosen, 0)
        grad = grad * slope
    if mask is not None:
        grad = torch.where(mask.view(-1, 1), grad, 0)
    return grad.float()
