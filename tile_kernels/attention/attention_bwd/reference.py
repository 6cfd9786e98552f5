"""References of the gradients of attention over shared rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.hca.reference import visible_lists
from tile_kernels.attention.softmax_reference import ELEMENTS_AT_ONCE, Lists
from tile_kernels.attention.sparse.reference import chosen_lists

Gradients = tuple[Tensor, Tensor, Tensor]


def joint_lse(lse: Tensor, sink: Tensor | None) -> Tensor:
    """The logarithm of the denominator of a softmax with a sink; `inf` where nothing is chosen."""
    return lse if sink is None else torch.logaddexp(lse, sink.to(lse).expand_as(lse))


def gradients(
    q: Tensor,
    rows: Tensor,
    lists: Lists,
    width: int,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    sink: Tensor | None,
) -> Gradients:
    """The gradients for `q`, `rows` and `sink`, some queries at a time.

    Args:
        q: `[T, h, d]`; float64 is computed in float64, anything else in float32.
        rows: `[N, d]`: keys, their first channels are values, as many as `out` has.
        lists: The rows of some queries: `index [t, width]`, and bool `valid` of that shape.
        width: The length of a list.
        grad: The gradient of `out`.
        out: The result of the attention.
        lse: `[T, h]`, without the sink.
        sm_scale: Multiplies the products of queries and keys.
        sink: `[h]`, or None.

    Returns:
        `grad_q` with the dtype of `q`; `grad_rows` and `grad_sink`, float32, or float64 as `q`.
    """
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    full = joint_lse(lse.to(dtype), sink)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    grad_q, grad_rows = torch.zeros_like(q), torch.zeros(rows.shape, dtype=dtype, device=q.device)
    grad_sink = torch.zeros(q.shape[1], dtype=dtype, device=q.device)
    if sink is not None:
        share = (sink.to(dtype) - full).exp() * delta
        grad_sink -= share.masked_fill(full == torch.inf, 0).sum(0)  # no key, or only the sink
    if rows.shape[0] == 0 or width == 0:
        return grad_q, grad_rows, grad_sink
    step = max(1, ELEMENTS_AT_ONCE // (width * q.shape[2]))
    for first in range(0, q.shape[0], step):
        some = slice(first, first + step)
        index, valid = lists(some)
        index, queries, given = index.long().masked_fill(~valid, 0), q[some].to(dtype), grad[some]
        keys = rows[index].to(dtype).masked_fill(~valid[..., None], 0)
        values = keys[..., : out.shape[2]]
        logits = torch.einsum("thd,tjd->thj", queries, keys) * sm_scale
        p = (logits - full[some, :, None]).exp().masked_fill(~valid[:, None], 0)
        dp = torch.einsum("thd,tjd->thj", given.to(dtype), values)
        ds = (p * (dp - delta[some, :, None])).masked_fill(~valid[:, None], 0) * sm_scale
        grad_q[some] = torch.einsum("thj,tjd->thd", ds, keys).to(q.dtype)
        pieces = torch.einsum("thj,thd->tjd", ds, queries)
        pieces[..., : out.shape[2]] += torch.einsum("thj,thd->tjd", p, given.to(dtype))
        grad_rows.index_add_(0, index[valid], pieces[valid])
    return grad_q, grad_rows, grad_sink


def sparse_attention_bwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    *,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> Gradients:
    """See `tile_kernels.attention.sparse_attention_bwd`. Any width of rows, float64 too."""
    rows = kv.reshape(kv.shape[0], kv.shape[-1])
    index = indices.reshape(q.shape[0], indices.shape[-1])
    lists = chosen_lists(index, topk_length, rows.shape[0])
    grad_q, grad_rows, grad_sink = gradients(
        q, rows, lists, index.shape[1], grad, out, lse, sm_scale, sink
    )
    return grad_q, grad_rows.view(kv.shape), grad_sink


def hca_attention_bwd(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    *,
    cu_seqlens: Tensor,
    ratio: int,
    window: int = 128,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `tile_kernels.attention.hca_attention_bwd`. Any width of rows, float64 too."""
    rows = window_kv if entries is None else torch.cat((window_kv, entries))
    num_entries = rows.shape[0] - window_kv.shape[0]
    lists = visible_lists(cu_seqlens, ratio, window, q.shape[0], num_entries)
    grad_q, grad_rows, grad_sink = gradients(
        q, rows, lists, window + num_entries, grad, out, lse, sm_scale, sink
    )
    of_window, of_entries = grad_rows.split((window_kv.shape[0], num_entries))
    return grad_q, of_window.clone(), of_entries.clone(), grad_sink
