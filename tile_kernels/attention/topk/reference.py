"""Reference of the choice of the best keys by their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.indexer_reference import ROWS_AT_ONCE, bound, in_range


def indexer_topk(
    logits: Tensor,
    k: int,
    end: Tensor | None = None,
    *,
    start: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
) -> Tensor:
    """See `tile_kernels.attention.indexer_topk`."""
    end = bound(end, logits, logits.shape[1])
    result = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    for first in range(0, logits.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        inside = in_range(None if start is None else start[rows], end[rows], logits.shape[1])
        found = _best(logits[rows], inside, k)
        if not sorted:
            found = found.masked_fill(found < 0, logits.shape[1]).sort(dim=1).values
            found = found.masked_fill(found == logits.shape[1], -1)
        result[rows, : found.shape[1]] = found.int()
    return result


def _best(logits: Tensor, inside: Tensor, k: int) -> Tensor:
    """The places of the `k` largest of each row, the largest first, -1 for what is not inside."""
    values = logits.float() + 0.0  # which makes one zero of two
    bits = values.masked_fill(values.isnan(), -torch.inf).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    absent = -(2**40)  # below every number
    order, places = order.masked_fill(~inside, absent).sort(dim=1, descending=True, stable=True)
    return places[:, :k].masked_fill(order[:, :k] == absent, -1)
