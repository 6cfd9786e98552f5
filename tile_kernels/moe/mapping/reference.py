"""Reference of the mapping between tokens and the rows of a grouped matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

Mapping = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]


def fused_mapping(topk_idx: Tensor, num_experts: int, capacity: int, alignment: int) -> Tensor:
    """The seven tensors of `get_fused_mapping` and the overflow, one behind the other: int32.

    `[3 * capacity + num_tokens * num_topk + 3 * num_experts + 1]`; `split_mapping` takes it apart.
    """
    flat, device = topk_idx.reshape(-1), topk_idx.device
    slots = torch.arange(flat.numel(), device=device)
    valid = (flat >= 0) & (flat < num_experts)
    expert, slot = flat[valid], slots[valid]
    count = torch.bincount(expert, minlength=num_experts)
    aligned = (count + alignment - 1) // alignment * alignment
    end = aligned.cumsum(0)
    start = end - aligned

    order = torch.sort(expert, stable=True).indices  # by expert, then by slot
    expert, slot = expert[order], slot[order]
    rank = torch.arange(expert.numel(), device=device) - (count.cumsum(0) - count)[expert]
    position = start[expert] + rank
    fits = position < capacity
    expert, slot, position = expert[fits], slot[fits], position[fits]

    by_position = torch.full((3, capacity), -1, device=device)
    num_topk = topk_idx.shape[1]
    by_position[:, position] = torch.stack([expert, slot // max(num_topk, 1), slot])
    by_slot = torch.full_like(flat, -1)
    by_slot[slot] = position
    start, end = start.clamp(max=capacity), end.clamp(max=capacity)
    overflow = (~fits).sum()[None]
    parts = (by_position.view(-1), by_slot, start, end, end - start, overflow)
    return torch.cat(parts).to(torch.int32)


def split_mapping(flat: Tensor, topk_shape: torch.Size, num_experts: int) -> tuple[Tensor, ...]:
    """The parts of `fused_mapping`'s result, as views: the seven tensors, then the overflow."""
    slots = topk_shape[0] * topk_shape[1]
    capacity = (flat.shape[0] - slots - 3 * num_experts - 1) // 3
    parts = flat.split([capacity] * 3 + [slots] + [num_experts] * 3 + [1])
    return *parts[:3], parts[3].view(topk_shape), *parts[4:]


def max_expanded_tokens(num_slots: int, num_experts: int, alignment: int) -> int:
    """Rows that are enough whichever experts are chosen."""
    return (num_slots + (alignment - 1) * num_experts) // alignment * alignment


def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    overflow: Tensor | None = None,
) -> Mapping:
    """See `tile_kernels.moe.get_fused_mapping`.

    >>> chosen = torch.tensor([[0, 2], [2, -1], [0, 3], [2, 0]])
    >>> get_fused_mapping(chosen, 4, 0, 4)[2].tolist()
    [0, 4, 7, -1, 1, 2, 6, -1, 5, -1, -1, -1]
    """
    synchronize = num_expanded_tokens == 0 and not force_no_sync
    capacity = num_expanded_tokens
    if synchronize:
        capacity = max_expanded_tokens(topk_idx.numel(), num_experts, alignment)
    flat = fused_mapping(topk_idx, num_experts, capacity, alignment)
    return finish_mapping(flat, topk_idx, num_experts, synchronize, overflow)


def finish_mapping(
    flat: Tensor, topk_idx: Tensor, num_experts: int, synchronize: bool, overflow: Tensor | None
) -> Mapping:
    """The 8-tuple from the flat result; if asked, reads the counts on the host."""
    a, b, c, d, e, f, g, dropped = split_mapping(flat, topk_idx.shape, num_experts)
    counts: list[int] = []
    if overflow is not None:
        overflow.copy_(dropped)
    if synchronize and not flat.is_meta:  # without values the buffers keep their full size
        counts = g.tolist()
        a, b, c = (part[: sum(counts)] for part in (a, b, c))
    return a, b, c, d, e, f, g, counts
