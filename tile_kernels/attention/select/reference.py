"""Reference of the choice of the best keys without their scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.indexer_reference import ROWS_AT_ONCE, Operand, bound
from tile_kernels.attention.logits.reference import indexer_logits
from tile_kernels.attention.topk.reference import indexer_topk


def indexer_select(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    topk: int | None = None,
) -> Tensor:
    """See `tile_kernels.attention.indexer_select`."""
    if topk is None:
        raise TypeError("topk must be an int, got None")
    start = bound(start, weights, 0)
    end = bound(end, weights, (k[0] if isinstance(k, tuple) else k).shape[0])
    chosen = [weights.new_empty((0, topk), dtype=torch.int32)]
    for first in range(0, weights.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        some = (q[0][rows], q[1][rows]) if isinstance(q, tuple) else q[rows]
        logits = indexer_logits(some, k, weights[rows], start[rows], end[rows])
        chosen.append(indexer_topk(logits, topk, end[rows], start=start[rows]))
    return torch.cat(chosen)
