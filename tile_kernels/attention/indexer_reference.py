"""What references of the lightning indexer share: scores of keys for each query, and their ranges.

Keys and queries are bfloat16, e4m3, or packed e2m1 with a ue8m0 exponent for each 32 values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.quant.formats import decode_e2m1, decode_ue8m0

Operand = Tensor | tuple[Tensor, Tensor]
GROUP = 32  # values of a row that share a ue8m0 exponent
_NAN_EXPONENT = 255
ROWS_AT_ONCE = 256  # of logits that are held, or sorted


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
