"""References of the scores of keys for each query, and of their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.indexer_reference import Operand, decode_operand, in_range, scores


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
