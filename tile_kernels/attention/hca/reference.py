"""Reference of attention over a window of tokens and all entries of compressed keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.indices.reference import entry_ranges, window_ranges
from tile_kernels.attention.softmax_reference import VALUE_CHANNELS, Lists, Results, attend


def visible_lists(
    cu_seqlens: Tensor, ratio: int, window: int, num_tokens: int, num_entries: int
) -> Lists:
    """The rows that each token sees, as `attend` takes them: of tokens, then of entries."""
    first_row, end_row = window_ranges(cu_seqlens, window, num_tokens)
    if num_entries:
        first_entry, end_entry = entry_ranges(cu_seqlens, ratio, num_tokens)
        end_entry = end_entry.clamp(max=num_entries)
    place = torch.arange(window, device=cu_seqlens.device)
    entry = torch.arange(num_entries, device=cu_seqlens.device)

    def lists(some: slice) -> tuple[Tensor, Tensor]:
        index = first_row[some, None] + place
        valid = index < end_row[some, None]
        if num_entries:
            seen = (entry >= first_entry[some, None]) & (entry < end_entry[some, None])
            index = torch.cat((index, (num_tokens + entry).expand_as(seen)), 1)
            valid = torch.cat((valid, seen), 1)
        return index, valid

    return lists


def attended(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    sm_scale: float,
    cu_seqlens: Tensor,
    ratio: int,
    window: int,
    sink: Tensor | None = None,
    d_v: int = VALUE_CHANNELS,
) -> Results:
    """`out`, `max_logits` and `lse`; see `tile_kernels.attention.hca_attention`."""
    rows, num_entries = window_kv, 0
    if entries is not None:
        rows, num_entries = torch.cat((window_kv, entries)), entries.shape[0]
    lists = visible_lists(cu_seqlens, ratio, window, q.shape[0], num_entries)
    return attend(q, rows, lists, window + num_entries, sm_scale, sink, d_v)


def hca_attention(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    sm_scale: float,
    *,
    cu_seqlens: Tensor,
    ratio: int,
    window: int = 128,
    sink: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | Results:
    """See `tile_kernels.attention.hca_attention`. Any width of rows, float64 too."""
    results = attended(q, window_kv, entries, sm_scale, cu_seqlens, ratio, window, sink)
    return results if return_stats else results[0]
