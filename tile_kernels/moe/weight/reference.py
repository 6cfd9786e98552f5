"""References of the weights of chosen experts."""

from __future__ import annotations

import torch

from tile_kernels.moe.scoring import ScoringFunc


def gate_scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """Computes the score of every expert.

    Args:
        logits: `[num_tokens, num_experts]`, float32.
        scoring_func: The name of a `ScoringFunc`.

    Returns:
        `[num_tokens, num_experts]`, float32.

    Example:
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
    raise ValueError(f"{scoring_func} computes no scores; a gate needs another function")


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
        logit_grads = scores * (grad - (grad_score * chosen).sum(1, keepdim=True))
        return torch.where(valid.any(1, keepdim=True), logit_grads, 0)  # also where scores are NaN
    if scoring is ScoringFunc.SIGMOID:
        slope = torch.sigmoid(logit) * torch.sigmoid(-logit)
    else:  # sigmoid(x) / (2 score), which is 0/0 far below zero
        slope = torch.where(
            logit < -80, torch.exp(logit / 2) / 2, torch.sigmoid(logit) / (2 * chosen)
        )
    slot_grads = torch.where(valid, grad_score * slope, 0)
    return grad.scatter_(1, idx, _sums_of_equal(slot_grads, idx))


def _sums_of_equal(values: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """For each slot the sum of all values under its index, always in the same order.

    Adding them while scattering would leave the order to the GPU.
    """
    equal = idx[:, :, None] == idx[:, None, :]
    return torch.where(equal, values[:, None, :], 0).sum(2)


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
