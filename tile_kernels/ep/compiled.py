"""Dispatch and combine as operators of PyTorch, for `torch.compile`.

Operators take and return tensors, so that a handle is represented by a token: a tensor with the
number of the handle in a table. The entry is removed when the memory of the token is freed, which
is when neither the program nor a backward pass can use it any more. A buffer is represented by a
name, because the compiler may replace a number by a symbol.

The number of received rows depends on data. It is a size that the compiler does not know, or, with
`do_cpu_sync=False`, the largest possible one.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.model import max_expanded_rows
from tile_kernels.ep.requests import NO_WAY_BACK, weights_cannot_return

if TYPE_CHECKING:
    from tile_kernels.ep.buffer import ElasticBuffer

_buffers: weakref.WeakValueDictionary[str, ElasticBuffer] = weakref.WeakValueDictionary()
_handles: dict[int, EPHandle] = {}
_numbers = itertools.count(1)


@dataclass
class TracedHandle:
    """The handle of a dispatch in a compiled function; `combine` and `dispatch` accept it.

    `token` represents the `EPHandle`, `num_rows` is the number of rows of its results, other fields
    are as there.
    """

    token: Tensor
    topk_idx: Tensor
    do_expand: bool
    num_experts: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    num_dropped: Tensor
    num_rows: int


def register_buffer(buffer: ElasticBuffer) -> str:
    """The name of a buffer in this process."""
    name = f"buffer {next(_numbers)}"
    _buffers[name] = buffer
    return name


def _token_of(handle: EPHandle) -> Tensor:
    number = next(_numbers)
    _handles[number] = handle
    token = torch.tensor([number])
    weakref.finalize(token.untyped_storage(), _handles.pop, number, None)
    return token


def resolved(handle: Any) -> Any:
    """The handle that a traced one represents; any other object as it is."""
    return _handles[int(handle.token)] if isinstance(handle, TracedHandle) else handle


# ---- operators ----------------------------------------------------------------------------------


@torch.library.custom_op("tile_kernels_ep::dispatch", mutates_args=())
def _dispatch(
    x: Tensor,
    sf: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    buffer: str,
    num_experts: int,
    num_max_tokens_per_rank: int,
    expert_alignment: int,
    num_max_rows: int,
    do_cpu_sync: bool,
    do_expand: bool,
    column_major_sf: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, scale factors, ids and weights; the token; four tensors of the handle."""
    received, ids, weights, handle, _ = _buffers[buffer].dispatch(
        x if sf is None else (x, sf), topk_idx, topk_weights, num_experts=num_experts,
        num_max_tokens_per_rank=num_max_tokens_per_rank, expert_alignment=expert_alignment,
        do_cpu_sync=do_cpu_sync, do_expand=do_expand,
        use_tma_aligned_col_major_sf=column_major_sf, num_max_rows=num_max_rows or None,
    )  # fmt: skip
    rows, scales = received if isinstance(received, tuple) else (received, x.new_empty(0))
    return (
        rows,
        scales,
        topk_idx.new_empty(0) if ids is None else ids,
        x.new_empty(0, dtype=torch.float32) if weights is None else weights,
        _token_of(handle),
        handle.psum_num_recv_tokens_per_scaleup_rank,
        handle.psum_num_recv_tokens_per_expert,
        handle.num_unaligned_recv_tokens_per_expert,
        handle.num_dropped,
    )


@_dispatch.register_fake
def _(
    x: Tensor, sf: Tensor | None, topk_idx: Tensor, topk_weights: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    buffer, num_experts, max_tokens, alignment, num_max_rows, *flags = others
    do_cpu_sync, do_expand, column_major_sf = flags
    found = _buffers[buffer]
    num_local, num_topk = num_experts // found.num_ranks, topk_idx.shape[1]
    if do_cpu_sync:
        num_rows: Any = torch.library.get_ctx().new_dynamic_size()
    elif num_max_rows:
        num_rows = num_max_rows
    else:
        num_rows = found.num_ranks * max_tokens
        if do_expand:
            num_rows = max_expanded_rows(num_rows, num_topk, num_local, alignment)
    scales = x.new_empty(0)
    if sf is not None and column_major_sf:
        scales = sf.new_empty((sf.shape[1], (num_rows + 3) // 4 * 4)).T[:num_rows]
    elif sf is not None:
        scales = sf.new_empty((num_rows, sf.shape[1]))
    weights = x.new_empty(0, dtype=torch.float32)
    if topk_weights is not None:
        weights = topk_weights.new_empty((num_rows,) if do_expand else (num_rows, num_topk))
    counts = [x.new_empty(n, dtype=torch.int32) for n in (num_local, num_local, 1)]
    return (
        x.new_empty((num_rows, x.shape[1])),
        scales,
        topk_idx.new_empty(0) if do_expand else topk_idx.new_empty((num_rows, num_topk)),
        weights,
        torch.empty(1, dtype=torch.int64),
        x.new_empty(found.num_scaleup_ranks, dtype=torch.int32),
        *counts,
    )


@torch.library.custom_op("tile_kernels_ep::dispatch_again", mutates_args=())
def _dispatch_again(
    x: Tensor,
    token: Tensor,
    topk_weights: Tensor | None,
    buffer: str,
    num_rows: int,
    expanded: bool,
    for_gradients: bool,
) -> tuple[Tensor, Tensor]:
    """Rows and weights along the routing of a token."""
    del num_rows, expanded
    handle = _handles[int(token)]
    rows: Tensor
    rows, ids, weights, _, _ = _buffers[buffer].dispatch(  # type: ignore[assignment]
        x.contiguous(), topk_weights=topk_weights, handle=handle
    )
    if weights is None:
        return rows, x.new_empty(0, dtype=torch.float32)
    if for_gradients and ids is not None:
        weights = weights * (ids >= 0)  # combine reads only local slots
    return rows, weights


@_dispatch_again.register_fake
def _(x: Tensor, token: Tensor, topk_weights: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    del token
    _, num_rows, expanded, _ = others
    weights = x.new_empty(0, dtype=torch.float32)
    if topk_weights is not None:
        shape = (num_rows,) if expanded else (num_rows, topk_weights.shape[1])
        weights = topk_weights.new_empty(shape)
    return x.new_empty((num_rows, x.shape[1])), weights


@torch.library.custom_op("tile_kernels_ep::combine", mutates_args=())
def _combine(
    x: Tensor,
    token: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    bias: list[Tensor],
    buffer: str,
) -> tuple[Tensor, Tensor]:
    """Sums, and the weights of the slots."""
    del topk_idx
    handle, biases = _handles[int(token)], tuple(bias)
    given: Any = None if not biases else biases[0] if len(biases) == 1 else biases
    total, weights, _ = _buffers[buffer].combine(x, handle, topk_weights=topk_weights, bias=given)
    return total, x.new_empty(0, dtype=torch.float32) if weights is None else weights


@_combine.register_fake
def _(
    x: Tensor, token: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    del token, others
    shape = (0,) if topk_weights is None else tuple(topk_idx.shape)
    return x.new_empty((topk_idx.shape[0], x.shape[1])), x.new_empty(shape, dtype=torch.float32)


# ---- gradients ----------------------------------------------------------------------------------


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, sf, topk_idx, topk_weights, ctx.buffer = inputs[:5]
    ctx.has_weights, ctx.has_sf = topk_weights is not None, sf is not None
    ctx.save_for_backward(output[4], topk_idx)


def _dispatch_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    grad_x, grad_sf, _, grad_weights = grads[:4]
    token, topk_idx = ctx.saved_tensors
    for_x, for_sf, _, for_weights = ctx.needs_input_grad[:4]
    weights = grad_weights.contiguous() if ctx.has_weights and for_weights else None
    back = back_sf = back_weights = None
    if for_x or weights is not None:
        rows = grad_x.contiguous() if for_x else grad_x[:, :0].contiguous()
        total, found = _combine(rows, token, topk_idx, weights, [], ctx.buffer)
        back = total if for_x else None
        back_weights = None if weights is None else found
    if for_sf and ctx.has_sf:
        back_sf = _combine(grad_sf.contiguous(), token, topk_idx, None, [], ctx.buffer)[0]
    return (back, back_sf, None, back_weights, *[None] * 8)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    x, token, _, topk_weights, bias, ctx.buffer = inputs
    ctx.num_rows, ctx.num_bias = x.shape[0], len(bias)
    ctx.has_weights = topk_weights is not None
    ctx.expanded = topk_weights is not None and topk_weights.dim() == 1
    ctx.save_for_backward(token)


def _combine_backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
    (token,) = ctx.saved_tensors
    for_weights = ctx.has_weights and ctx.needs_input_grad[3]
    rows, weights = _dispatch_again(
        grad.contiguous(), token, grad_weights.contiguous() if for_weights else None, ctx.buffer,
        ctx.num_rows, ctx.expanded, True,
    )  # fmt: skip
    biases = [grad] * ctx.num_bias
    return rows, None, None, weights if for_weights else None, biases, None


def _dispatch_again_backward(*_: Any) -> None:
    raise RuntimeError(
        "ElasticBuffer.dispatch: with a handle in a compiled function it has no gradient"
    )


_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
_combine.register_autograd(_combine_backward, setup_context=_save_combine)
_dispatch_again.register_autograd(_dispatch_again_backward)


# ---- what the buffer calls ----------------------------------------------------------------------


def dispatch(buffer: ElasticBuffer, arguments: Any) -> tuple[Any, ...]:
    """`ElasticBuffer.dispatch` in a function that is being compiled."""
    a = arguments
    _check_plain(a, "dispatch")
    pair = a.x if isinstance(a.x, tuple) else (a.x, None)
    if len(pair) > 2:
        raise ValueError(
            "ElasticBuffer.dispatch: x must be a tensor or a pair in a compiled function, got "
            f"{len(pair)} tensors"
        )
    x, sf = pair
    if a.handle is not None:
        if sf is not None:
            raise ValueError(
                "ElasticBuffer.dispatch: x must be one tensor with a handle in a compiled function"
            )
        raise_unless_traced("dispatch", a.handle)
        num_rows = a.handle.num_rows
        rows, weights = _dispatch_again(
            x, a.handle.token, a.topk_weights, buffer.name, num_rows, a.handle.do_expand, False
        )
        given = None if a.topk_weights is None else weights
        return rows, None, given, a.handle
    if a.cumulative_local_expert_recv_stats is not None:
        raise ValueError(
            "ElasticBuffer.dispatch: cumulative_local_expert_recv_stats must be None in a compiled "
            "function; add handle.num_unaligned_recv_tokens_per_expert to it"
        )
    if a.topk_idx is None or a.num_experts is None:
        raise ValueError("ElasticBuffer.dispatch: topk_idx and num_experts must be given")
    if weights_cannot_return(a.topk_weights, a.do_expand, buffer.allow_multiple_reduction):
        raise ValueError(f"ElasticBuffer.dispatch: {NO_WAY_BACK}")
    max_tokens = a.num_max_tokens_per_rank or buffer.num_max_tokens_per_rank
    rows, scales, ids, weights, token, by_rank, by_expert, unaligned, dropped = _dispatch(
        x, sf, a.topk_idx, a.topk_weights, buffer.name, a.num_experts, max_tokens,
        a.expert_alignment or 1, a.num_max_rows or 0,
        True if a.do_cpu_sync is None else bool(a.do_cpu_sync), bool(a.do_expand),
        bool(a.use_tma_aligned_col_major_sf),
    )  # fmt: skip
    handle = TracedHandle(
        token, a.topk_idx, bool(a.do_expand), a.num_experts, [], by_rank, by_expert, unaligned,
        dropped, rows.shape[0],
    )  # fmt: skip
    received = rows if sf is None else (rows, scales)
    given = None if a.topk_weights is None else weights
    return received, None if a.do_expand else ids, given, handle


def combine(buffer: ElasticBuffer, arguments: Any) -> tuple[Any, ...]:
    """`ElasticBuffer.combine` in a function that is being compiled."""
    a = arguments
    _check_plain(a, "combine")
    raise_unless_traced("combine", a.handle)
    bias = [] if a.bias is None else list(a.bias) if isinstance(a.bias, tuple) else [a.bias]
    total, weights = _combine(
        a.x, a.handle.token, a.handle.topk_idx, a.topk_weights, bias, buffer.name
    )
    return total, None if a.topk_weights is None else weights


def raise_unless_traced(call: str, handle: object) -> None:
    """Handles of eager calls are no tensors, so that a graph cannot take them."""
    if not isinstance(handle, TracedHandle):
        raise TypeError(
            f"ElasticBuffer.{call}: handle must come from a dispatch in a compiled function, got "
            f"{type(handle).__name__}"
        )


def _check_plain(arguments: Any, call: str) -> None:
    a = arguments
    if a.async_with_compute_stream or a.previous_event is not None:
        raise ValueError(
            f"ElasticBuffer.{call}: async_with_compute_stream and previous_event must not be given "
            "in a compiled function, which has its own order"
        )
