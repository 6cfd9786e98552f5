"""Reference of the indexer's target: the attention that entries get, of all heads together."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.softmax_reference import ELEMENTS_AT_ONCE
from tile_kernels.attention.sparse.reference import chosen_lists


def attention_target(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse_full: Tensor,
    sm_scale: float,
    *,
    normalize: bool = True,
) -> Tensor:
    """See `tile_kernels.attention.attention_target`. Any width of rows, float64 too."""
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    rows = kv.reshape(kv.shape[0], kv.shape[-1])
    index = indices.reshape(q.shape[0], indices.shape[-1])
    p = torch.zeros(index.shape, dtype=dtype, device=q.device)
    if rows.shape[0] == 0 or p.numel() == 0:
        return p
    lists = chosen_lists(index, None, rows.shape[0])
    step = max(1, ELEMENTS_AT_ONCE // (index.shape[1] * q.shape[2]))
    for first in range(0, q.shape[0], step):
        some = slice(first, first + step)
        chosen, valid = lists(some)
        keys = rows[chosen.long().masked_fill(~valid, 0)].to(dtype)
        keys = keys.masked_fill(~valid[..., None], 0)  # nothing of another row, not even a NaN
        logits = torch.einsum("thd,tjd->thj", q[some].to(dtype), keys) * sm_scale
        weights = (logits - lse_full[some].to(dtype)[..., None]).exp()
        p[some] = weights.sum(1).masked_fill(~valid, 0)
    if not normalize:
        return p
    total = p.sum(1, keepdim=True)
    return torch.where(total == 0, 0, p / total)
