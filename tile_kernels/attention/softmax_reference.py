"""What references of attention over shared rows have in common: one softmax over a list of rows.

All heads of a query attend to the same rows, and a row is key and value at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VALUE_CHANNELS = 512  # the first channels of a row are its value
ELEMENTS_AT_ONCE = 2**25  # of gathered rows

Lists = Callable[[slice], tuple[Tensor, Tensor]]
Results = tuple[Tensor, Tensor, Tensor]


def attend(
    q: Tensor,
    rows: Tensor,
    lists: Lists,
    width: int,
    sm_scale: float,
    sink: Tensor | None,
    d_v: int = VALUE_CHANNELS,
) -> Results:
    """`out`, `max_logits` and `lse` of all queries, some queries at a time.

    Args:
        q: `[T, h, d]`; float64 is computed in float64, anything else in float32.
        rows: `[N, d]`: keys, their first `d_v` channels are values.
        lists: The rows of some queries: `index [t, width]`, and bool `valid` of that shape.
        width: The length of a list.
        sm_scale: Multiplies the products of queries and keys.
        sink: `[h]`, or None.
        d_v: Channels of a value.

    Returns:
        `out [T, h, d_v]` with the dtype of `q`; `max_logits` and `lse`, `[T, h]`.
    """
    num_tokens, channels = q.shape[0], q.shape[2]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    step = max(1, ELEMENTS_AT_ONCE // max(1, width * channels))
    parts = [_attend(q[:0].to(dtype), rows, *lists(slice(0, 0)), sm_scale, sink, d_v)]
    for first in range(0, num_tokens, step):
        some = slice(first, first + step)
        found = _attend(q[some].to(dtype), rows, *lists(some), sm_scale, sink, d_v)
        parts.append((found[0].to(q.dtype), *found[1:]))
    out, top, lse = (torch.cat(each) for each in zip(*parts[min(1, num_tokens) :]))
    return out.to(q.dtype), top, lse


def _attend(
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    valid: Tensor,
    sm_scale: float,
    sink: Tensor | None,
    d_v: int,
) -> Results:
    if rows.shape[0] == 0 or index.shape[1] == 0:
        lowest = q.new_full(q.shape[:2], -torch.inf)
        return q[..., :d_v].masked_fill(lowest[..., None] < 0, 0), lowest, -lowest
    keys = rows[index.long().masked_fill(~valid, 0)].to(q.dtype)
    keys = keys.masked_fill(~valid[..., None], 0)  # nothing of another row, not even a NaN
    logits = torch.einsum("thd,tjd->thj", q, keys) * sm_scale
    logits = logits.masked_fill(~valid[:, None], -torch.inf)
    top = logits.amax(-1)
    # A logit that overflows has no meaningful weight.
    lse = logits.logsumexp(-1).masked_fill(top == torch.inf, torch.nan)
    none = lse == -torch.inf
    full = lse if sink is None else torch.logaddexp(lse, sink.to(lse).expand_as(lse))
    weights = (logits - full.masked_fill(none, 0)[..., None]).exp()
    out = torch.einsum("thj,tjd->thd", weights, keys[..., :d_v])
    return out, top, lse.masked_fill(none, torch.inf)
