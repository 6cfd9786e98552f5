"""Reference of `hash_gate`."""

from __future__ import annotations

import torch

from tile_kernels.moe.placement import to_local_experts
from tile_kernels.moe.weight.reference import topk_weights


def hashed_experts(
    token_ids: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The table's row of each token, int64 `[num_tokens, num_topk]`; -1 for masked tokens and for
    ids outside the table.

    >>> hashed_experts(torch.tensor([1, 7]), torch.tensor([[0, 3], [2, 5]])).tolist()
    [[2, 5], [-1, -1]]
    """
    known = _routes(token_ids, table, mask)
    return torch.where(known[:, None], table[token_ids.long().where(known, 0)].long(), -1)


def _routes(
    token_ids: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    return known if mask is None else known & mask.view(-1)


def hash_gate(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
    mask: torch.Tensor | None = None,
    num_shared_experts: int = 0,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    ep_rank: int = 0,
    num_ep_ranks: int = 1,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(topk_idx, topk_weights)` of each token; see `tile_kernels.moe.hash_gate`.

    >>> table = torch.tensor([[0, 3], [2, 1]])
    >>> hash_gate(torch.zeros(1, 4), torch.tensor([1]), table)
    (tensor([[2, 1]]), tensor([[0.5000, 0.5000]]))
    """
    if logits.dtype is torch.bfloat16:
        logits = logits.float()
    chosen = hashed_experts(token_ids, table, mask)
    weights = topk_weights(logits, chosen, scoring_func, routed_scaling_factor)
    routes = _routes(token_ids, table, mask)
    return to_local_experts(
        chosen, weights, routes, logits.shape[1], num_shared_experts, to_physical_map,
        logical_count, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
    )  # fmt: skip
