"""The lightning indexer: scores of keys for each query, the best of them, and the gradient.

Keys and queries are bfloat16, e4m3, or packed e2m1 with a ue8m0 exponent for each 32 values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.torch.formats import decode_e2m1, decode_ue8m0

Operand = Tensor | tuple[Tensor, Tensor]
GROUP = 32  # values of a row that share a ue8m0 exponent
_NAN_EXPONENT = 255
_ROWS_AT_ONCE = 256  # of logits that are held, or sorted


def decode_operand(operand: Operand) -> tuple[Tensor, Tensor | None]:
    """float32 `[..., D]`, and the scale of each row where it is apart from the values."""
    data, sf = operand if isinstance(operand, tuple) else (operand, None)
    if data.dtype != torch.int8 or sf is None:
        return data.float(), sf
    scales = decode_ue8m0(sf).masked_fill(sf == _NAN_EXPONENT, torch.nan)
    return decode_e2m1(data) * scales.repeat_interleave(GROUP, -1), None


def scores(q: Tensor, k: Tensor, weights: Tensor, k_sf: Tensor | None = None) -> Tensor:
    """`[T, S]`: `k_sf[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s])`, in their dtype."""
    total = q.new_zeros(q.shape[0], k.shape[0])
    for head in range(q.shape[1]):
        total = total + weights[:, head, None] * torch.relu(q[:, head] @ k.T)
    return total if k_sf is None else total * k_sf


def bound(given: Tensor | None, like: Tensor, default: int) -> Tensor:
    """The bound `given` of each query, or int32 `[T]` of `default`; `like` has `T` rows."""
    if given is not None:
        return given
    return like.new_full(like.shape[:1], default, dtype=torch.int32)


def in_range(start: Tensor | None, end: Tensor, num_keys: int) -> Tensor:
    """bool `[T, S]`: the keys from `start` to `end` of each query; from 0 on without `start`."""
    keys = torch.arange(num_keys, device=end.device)
    inside = keys < end[:, None]
    return inside if start is None else inside & (keys >= start[:, None])


def indexer_logits(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `tile_kernels.attention.indexer_logits`."""
    keys, k_sf = decode_operand(k)
    logits = scores(decode_operand(q)[0], keys, weights, k_sf)
    outside = ~in_range(start, end, keys.shape[0])
    return logits.masked_fill(outside, -torch.inf).to(out_dtype)


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
    for first in range(0, logits.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
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
    for first in range(0, weights.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        some = (q[0][rows], q[1][rows]) if isinstance(q, tuple) else q[rows]
        logits = indexer_logits(some, k, weights[rows], start[rows], end[rows])
        chosen.append(indexer_topk(logits, topk, end[rows], start=start[rows]))
    return torch.cat(chosen)


def indexer_ranges(cu_seqlens: Tensor, ratio: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """See `tile_kernels.attention.indexer_ranges`."""
    bounds = cu_seqlens.long().clamp(0, num_tokens).cummax(0).values  # as `kv_compress` takes them
    tokens = torch.arange(num_tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds, tokens, right=True) - 1
    sequence = sequence.clamp(0, max(bounds.shape[0] - 2, 0))
    num_keys = bounds.diff() // ratio
    first_key = num_keys.cumsum(0) - num_keys
    start = first_key[sequence]
    end = start + (tokens - bounds[sequence] + 1) // ratio
    outside = (tokens < bounds[0]) | (tokens >= bounds[-1])
    start, end = start.masked_fill(outside, 0), end.masked_fill(outside, 0)
    return start.int(), end.int()


def selected_gradients(
    q: Tensor, k: Tensor, weights: Tensor, k_sf: Tensor | None, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `scores` for `q`, `k`, `weights`, given `grad` at `indices` `[T, K]`."""
    grad_q, grad_k = torch.zeros_like(q), torch.zeros_like(k)
    grad_weights = torch.zeros_like(weights, dtype=q.dtype)
    if k.shape[0] == 0:  # no key to stand in for those that are missing
        return grad_q, grad_k, grad_weights
    present = (indices >= 0) & (indices < k.shape[0])
    chosen = indices.long().masked_fill(~present, 0)
    scaled = grad.to(q.dtype).masked_fill(~present, 0)
    if k_sf is not None:
        scaled = scaled * k_sf.to(q.dtype)[chosen]
    for t in range(q.shape[0]):
        keys = k[chosen[t]].masked_fill(~present[t, :, None], 0)  # also where a key is NaN
        dots = keys @ q[t].T  # [K, h]
        grad_weights[t] = scaled[t] @ torch.relu(dots)
        passed = (dots > 0) * scaled[t, :, None] * weights[t].to(q.dtype)
        grad_q[t] = passed.T @ keys
        grad_k.index_add_(0, chosen[t], passed @ q[t])
    return grad_q, grad_k, grad_weights


def indexer_logits_bwd(
    q: Tensor, k: Operand, weights: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `tile_kernels.attention.indexer_logits_bwd`."""
    keys, k_sf = decode_operand(k)
    return selected_gradients(q.float(), keys, weights, k_sf, indices, grad)
