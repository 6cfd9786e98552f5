"""Reference of the lists of rows that queries attend to."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.indexer_reference import indexer_ranges

Ranges = tuple[Tensor, Tensor]


def window_ranges(cu_seqlens: Tensor, window: int, num_tokens: int) -> Ranges:
    """The first token in the window of each token, and the one after its last; int32 `[T]`.

    >>> first, end = window_ranges(torch.tensor([0, 3, 5]), 2, 6)
    >>> first.tolist(), end.tolist()
    ([0, 0, 1, 3, 3, 0], [1, 2, 3, 4, 5, 0])
    """
    bounds = cu_seqlens.long().clamp(0, num_tokens).cummax(0).values
    token = torch.arange(num_tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    inside = (sequence >= 0) & (sequence < bounds.shape[0] - 1)
    start = bounds[sequence.clamp(min=0)]
    first = torch.maximum(start, token + 1 - window).masked_fill(~inside, 0)
    return first.int(), (token + 1).masked_fill(~inside, 0).int()


def entry_ranges(cu_seqlens: Tensor, ratio: int, num_tokens: int) -> Ranges:
    """The first entry that each token sees, and the one after its last; int32 `[T]`."""
    return indexer_ranges(cu_seqlens, ratio, num_tokens)


def attention_indices(
    selected: Tensor | None,
    cu_seqlens: Tensor,
    *,
    window: int = 128,
    ratio: int = 4,
    num_tokens: int | None = None,
    entry_offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `tile_kernels.attention.attention_indices`."""
    if num_tokens is None:
        if selected is None:
            raise TypeError("num_tokens must be given without selected")
        num_tokens = selected.shape[0]
    offset = num_tokens if entry_offset is None else entry_offset
    first, end = window_ranges(cu_seqlens, window, num_tokens)
    rows = first[:, None] + torch.arange(window, device=first.device, dtype=torch.int32)
    valid = rows < end[:, None]
    if selected is not None:
        first, end = entry_ranges(cu_seqlens, ratio, num_tokens)
        seen = (selected >= first[:, None]) & (selected < end[:, None])
        rows, valid = torch.cat((rows, selected + offset), 1), torch.cat((valid, seen), 1)
    order = (~valid).long().argsort(dim=1, stable=True)
    indices = rows.masked_fill(~valid, -1).gather(1, order)
    return indices.int(), valid.sum(1).int()
