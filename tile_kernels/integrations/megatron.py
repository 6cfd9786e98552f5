"""Megatron-core's fused router, on the operators of this package.

Megatron-core calls `fused_topk_with_score_function` of TransformerEngine where routers are fused
(`--moe-router-fusion`). This function takes its place:

    from megatron.core.transformer.moe import moe_utils
    from tile_kernels.integrations import megatron

    moe_utils.HAVE_TE = True
    moe_utils.fused_topk_with_score_function = megatron.fused_topk_with_score_function

Dispatch and combine are those of `tile_kernels.ep.install_as_deep_ep`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.integrations.expert_parallel import fused_combine, fused_dispatch
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.runtime import checks

__all__ = ["fused_combine", "fused_dispatch", "fused_topk_with_score_function"]

_SCORES = ("softmax", "sigmoid")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Chooses experts and computes their probabilities, as matrices of tokens by experts.

    Scores are computed and ranked in float32, also for logits in 16 bits, where choices can differ
    from those of scores that were rounded. Equal scores go to the smaller index. Differentiable in
    `logits`.

    Args:
        logits: `[T, E]`, float32, bfloat16 or float16.
        topk: Experts of a token, up to 32.
        use_pre_softmax: With softmax: whether probabilities are those of all experts, rather than
            of the chosen ones.
        num_groups: Groups of experts; None for none.
        group_topk: Groups that stay: those with the largest sums of the best `topk // group_topk`
            scores; None or 0 for all.
        scaling_factor: Multiplies the probabilities; None or 0 for none.
        score_function: `"softmax"` or `"sigmoid"`, whose probabilities are divided by their sum
            unless `topk` is 1.
        expert_bias: `[E]`, added to sigmoid scores for the choice only; or None. With softmax it
            has no effect.

    Returns:
        `(routing_probs, routing_map)`: `[T, E]`, in the dtype of `logits`, 0 where an expert was
        not chosen; and `[T, E]`, bool.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> probs, chosen = fused_topk_with_score_function(
        ...     logits, 2, False, None, None, None, "softmax", None
        ... )
        >>> chosen.tolist(), round(probs.sum().item(), 4)
        ([[False, True, True]], 1.0)
    """
    with checks.named("fused_topk_with_score_function"):
        checks.tensor("logits", logits, ("T", "E"), _FLOATS)
        num_experts = logits.shape[1]
        checks.integer("topk", topk, 1, min(MAX_SLOTS, num_experts))
        checks.boolean("use_pre_softmax", use_pre_softmax)
        checks.one_of("score_function", score_function, _SCORES)
        kept = checks.integer("group_topk", group_topk or 0, 0, num_groups or 0)
        if kept and num_groups:
            if num_experts % num_groups:
                raise ValueError(f"num_groups must divide {num_experts} experts, got {num_groups}")
            size, best = num_experts // num_groups, topk // kept
            if not 1 <= best <= size or topk > kept * size:
                raise ValueError(
                    f"group_topk must be at most topk, and its groups of {size} experts must hold "
                    f"{topk} experts, got {kept}"
                )
        factor = 1.0
        if scaling_factor:
            factor = checks.finite("scaling_factor", scaling_factor)
        if expert_bias is not None:
            checks.tensor("expert_bias", expert_bias, ("E",), _FLOATS, shape=(num_experts,))
    values = logits.float().contiguous()
    with torch.no_grad():
        scores = values
        if score_function == "sigmoid":
            scores = values.sigmoid() if expert_bias is None else values.sigmoid() + expert_bias
        elif use_pre_softmax:
            scores = values.softmax(1)
        if kept and num_groups:
            scores = _of_best_groups(scores, num_groups, kept, topk // kept)
        ids = moe.topk_gate(scores, topk)
    if score_function == "softmax" and use_pre_softmax:
        weights = values.softmax(1).gather(1, ids) * factor
    elif score_function == "sigmoid" and topk == 1:
        weights = values.gather(1, ids).sigmoid() * factor
    else:
        weights = moe.topk_weights(values, ids, score_function, factor)
    probs = torch.zeros_like(logits).scatter(1, ids, weights.to(logits.dtype))
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return probs, chosen


def _of_best_groups(scores: Tensor, num_groups: int, kept: int, best: int) -> Tensor:
    """Scores, -inf outside of the groups whose best scores have the largest sums."""
    groups = scores.unflatten(1, (num_groups, -1))
    sums = groups.topk(best, 2).values.sum(2)
    stays = torch.zeros_like(sums, dtype=torch.bool)
    stays.scatter_(1, moe.topk_gate(sums, kept), True)
    return groups.masked_fill(~stays[..., None], -torch.inf).flatten(1)
