"""Reference of attention over chosen rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.softmax_reference import VALUE_CHANNELS, Lists, Results, attend


def chosen_lists(index: Tensor, topk_length: Tensor | None, num_rows: int) -> Lists:
    """The rows that `index [T, k]` chooses, as `attend` takes them."""
    place = torch.arange(index.shape[1], device=index.device)

    def lists(some: slice) -> tuple[Tensor, Tensor]:
        valid = (index[some] >= 0) & (index[some] < num_rows)
        if topk_length is not None:
            valid = valid & (place < topk_length[some, None])
        return index[some], valid

    return lists


def attended(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    d_v: int = VALUE_CHANNELS,
) -> Results:
    """`out`, `max_logits` and `lse`; see `tile_kernels.attention.sparse_attention`."""
    rows = kv.reshape(kv.shape[0], kv.shape[-1])
    index = indices.reshape(q.shape[0], indices.shape[-1])
    lists = chosen_lists(index, topk_length, rows.shape[0])
    return attend(q, rows, lists, index.shape[1], sm_scale, sink, d_v)


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | Results:
    """See `tile_kernels.attention.sparse_attention`. Any width of rows, float64 too."""
    results = attended(q, kv, indices, sm_scale, sink, topk_length)
    return results if return_stats else results[0]


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = VALUE_CHANNELS,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> Results:
    """See `tile_kernels.attention.flash_mla_sparse_fwd`."""
    return attended(q, kv, indices, sm_scale, attn_sink, topk_length, d_v)
