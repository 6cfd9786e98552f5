"""`sparse_attention_bwd`, `hca_attention_bwd`: the gradients of attention over shared rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention import softmax
from tile_kernels.attention.attention_bwd import reference
from tile_kernels.attention.attention_bwd.plan import (
    HEADS,
    chunk_tokens,
    padded_slots,
    plan_gradients,
    plan_prepare,
    plan_rows,
    plan_sink,
)
from tile_kernels.attention.indices.reference import entry_ranges, window_ranges
from tile_kernels.attention.softmax_plan import HOPPER
from tile_kernels.attention.softmax_reference import VALUE_CHANNELS
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

Gradients = tuple[Tensor, Tensor, Tensor]

_MODULE = "tile_kernels.attention.attention_bwd.kernel"
_PREPARE = Kernel(_MODULE, "prepare_gradients", plan_prepare)
_SINK = Kernel(_MODULE, "sink_gradient", plan_sink)
_GRADIENTS = Kernel(_MODULE, "token_gradients", plan_gradients)
_ROWS = Kernel(_MODULE, "add_pieces", plan_rows)

# ---- what both operators do ----------------------------------------------------------------------


def _check_results(q: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> None:
    """What the attention returned, and the gradient of it."""
    results = (*q.shape[:2], VALUE_CHANNELS)
    for name, value in (("grad", grad), ("out", out)):
        checks.tensor(name, value, ("T", "h", "512"), torch.bfloat16, shape=results)
    checks.tensor("lse", lse, ("T", "h"), torch.float32, shape=tuple(q.shape[:2]))


def _prepare(a: Any, grad_sink: Spec, full: Spec, delta: Spec, share: Spec) -> list[Launch | Host]:
    """Launches that compute the statistics and, from them, the gradient of the sink."""
    heads = a.q.shape[1]
    rows = [softmax.dense(x).view(-1, VALUE_CHANNELS) for x in (a.grad, a.out)]
    flat = [x.view(-1) for x in (softmax.dense(a.lse), full, delta, share)]
    arguments = (*rows, flat[0], softmax.dense(a.sink), *flat[1:])
    found: list[Launch | Host] = [Launch(_PREPARE, (heads, a.sink is not None), arguments)]
    if a.sink is None:
        return [*found, Host(Tensor.zero_, (grad_sink,))]
    return [*found, Launch(_SINK, (heads,), (share, grad_sink))]


def _scratch(q: Tensor, num_slots: int, num_rows: int) -> tuple[Out, ...]:
    """Statistics; indices sorted by row; pieces of the gradients of rows, of some queries."""
    count = q.shape[0] * num_slots
    groups = _groups(q)
    pieces = chunk_tokens(q.shape[0], groups, num_slots, q.shape[2]) * groups
    return (
        *(Out(name, q.shape[:2], torch.float32) for name in ("full", "delta", "share")),
        Out("chosen", (count,), torch.int32),
        Out("order", (count,), torch.int64),
        Out("starts", (num_rows + 1,), torch.int32),
        Out("cursor", (num_rows,), torch.int32),
        Out("pieces", (pieces * padded_slots(num_slots), q.shape[2]), torch.bfloat16),
    )


def _launches(
    a: Any, rows: Spec, indices: Spec, length: Any, grads: tuple[Spec, Spec, Spec], *scratch: Spec
) -> list[Launch | Host]:
    """All launches, for lists of rows: `grads` are those of queries, rows and sinks."""
    full, delta, share, chosen, order, starts, cursor, pieces = scratch
    grad_q, grad_rows, grad_sink = grads
    num_tokens, heads, channels = a.q.shape
    groups, num_slots = _groups(a.q), indices.shape[1]
    step = chunk_tokens(num_tokens, groups, num_slots, channels)
    operands = (softmax.dense(a.q), rows, indices, length, softmax.dense(a.grad))
    found = _prepare(a, grad_sink, full, delta, share)
    found.append(Host(sort_by_row, (indices, length, chosen, order, starts)))
    for first in range(0, num_tokens, step):
        some = (first, min(step, num_tokens - first))
        found += [
            Launch(
                _GRADIENTS,
                (channels, heads, length is not None),
                (*operands, full, delta, grad_q, pieces, *some, float(a.sm_scale)),
            ),
            Launch(
                _ROWS,
                (channels, groups),
                (order, starts, cursor, pieces, grad_rows, num_slots, *some),
            ),
        ]
    return found


def _groups(q: Any) -> int:
    return -(-q.shape[1] // HEADS)


def sort_by_row(
    indices: Tensor, length: Tensor | None, chosen: Tensor, order: Tensor, starts: Tensor
) -> None:
    """Positions in `indices` by the row that they choose, in `order`; `starts` has those of rows.

    The sort is stable, so that the positions of a row ascend. Those that choose no row come last.
    """
    num_rows = starts.shape[0] - 1
    valid = (indices >= 0) & (indices < num_rows)
    if length is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < length[:, None]
    keys = indices.masked_fill(~valid, num_rows).flatten()
    torch.sort(keys, stable=True, dim=0, out=(chosen, order))
    numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=indices.device)
    torch.searchsorted(chosen, numbers, out_int32=True, out=starts)


# ---- sparse_attention_bwd ------------------------------------------------------------------------


class SparseArguments(NamedTuple):
    q: Tensor
    kv: Tensor
    indices: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    sm_scale: float
    sink: Tensor | None
    topk_length: Tensor | None

    def check(self) -> None:
        softmax.check_lists(*self[:3], *self[6:])
        checks.countable("indices", self.indices)
        _check_results(self.q, self.grad, self.out, self.lse)

    def check_values(self) -> None:
        softmax.check_list_values(self.kv, self.indices, self.topk_length)

    def outputs(self) -> tuple[Out, Out, Out]:
        return (
            Out("grad_q", self.q.shape, torch.bfloat16),
            Out("grad_kv", self.kv.shape, torch.float32),
            Out("grad_sink", (self.q.shape[1],), torch.float32),
        )

    def scratch(self) -> tuple[Out, ...]:
        return _scratch(self.q, self.indices.shape[1], self.kv.shape[0])

    def launches(
        self, grad_q: Spec, grad_kv: Spec, grad_sink: Spec, *scratch: Spec
    ) -> list[Launch | Host]:
        grads = (grad_q, grad_kv, grad_sink)
        if 0 in (self.q.numel(), self.kv.numel(), self.indices.numel()):
            return [Host(Tensor.zero_, (x,)) for x in grads]
        rows, indices, length = map(softmax.dense, (self.kv, self.indices, self.topk_length))
        return _launches(self, rows, indices, length, grads, *scratch)


def cost_sparse(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None = None, **_: Any
) -> Cost:
    """Rows are read once and their gradients written once; products of all indices or lengths."""
    num_tokens, heads, channels = q.shape
    pairs = indices.numel()
    if topk_length is not None and topk_length.device.type != "meta":
        pairs = int(topk_length.clamp(0, indices.shape[-1]).sum())
    results = num_tokens * heads * (4 * VALUE_CHANNELS + 4)
    return Cost(
        4 * q.numel() + results + 6 * kv.numel() + 4 * indices.numel(),
        2 * heads * pairs * (3 * channels + 2 * VALUE_CHANNELS),
    )


def _reference(*values: Any) -> Gradients:
    *arguments, sink, topk_length = values
    return reference.sparse_attention_bwd(*arguments, sink=sink, topk_length=topk_length)


SPARSE_ATTENTION_BWD = Operator(
    "attention.sparse_attention_bwd",
    SparseArguments,
    reference=_reference,
    cost=cost_sparse,
    archs=(HOPPER,),
)


@SPARSE_ATTENTION_BWD.public(reference=reference.sparse_attention_bwd)
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
    """Computes the gradients of `sparse_attention` from that of its result.

    With `L = log(exp(lse) + exp(sink))`, `s` the logits of a query's rows, `k` those rows and `v`
    their first 512 channels,

        p = exp(s - L)    D = grad . out    ds = p * (grad . v - D)
        grad_q[t, h]  = sm_scale * sum over j of ds[j] * k[j]
        grad_kv[n]    = sum over t, h, j with indices[t, j] = n of sm_scale * ds * q + p * grad
        grad_sink[h]  = -sum over t of exp(sink - L) * D

    Products have bfloat16 operands, `p` and `ds` included, and float32 sums. Each query and group
    of 64 heads has one piece of the gradient of each of its rows; pieces are rounded to bfloat16
    and added in float32 in a fixed order, without atomics: equal arguments give equal bits. Pieces
    take up to about 1 GiB of memory. Queries without a row have gradients of zero, and so has what
    an infinite sink hides. This is what autograd calls for `sparse_attention`.

    Args:
        q: `[T, h, d]`, as in `sparse_attention`.
        kv: `[N, d]` or `[N, 1, d]`, as in `sparse_attention`.
        indices: `[T, k]` or `[T, 1, k]`, as in `sparse_attention`, fewer than `2**31` in all.
        grad: `[T, h, 512]`, bfloat16: the gradient of `out`.
        out: `[T, h, 512]`, bfloat16: the result of `sparse_attention`.
        lse: `[T, h]`, float32: its statistic.
        sm_scale: The factor of logits.
        sink: `[h]`, float32, as in `sparse_attention`.
        topk_length: `[T]`, int32, as in `sparse_attention`.

    Returns:
        `(grad_q, grad_kv, grad_sink)`: bfloat16 with the shape of `q`, float32 with that of `kv`,
        float32 `[h]`, zero without a sink. All are contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or `sm_scale` is not positive and
            finite.

    Example:
        >>> from tile_kernels.attention import sparse_attention
        >>> q, kv = torch.zeros(1, 1, 512).bfloat16(), torch.ones(2, 512).bfloat16()
        >>> indices = torch.tensor([[1, -1]], dtype=torch.int32)
        >>> out, _, lse = sparse_attention(q, kv, indices, 1.0, return_stats=True)
        >>> grads = sparse_attention_bwd(q, kv, indices, torch.ones_like(out), out, lse, 1.0)
        >>> grads[1][:, 0].tolist()
        [0.0, 1.0]
    """
    rows, index = softmax.without_kv_head(SPARSE_ATTENTION_BWD, kv, indices)
    grads = SPARSE_ATTENTION_BWD(q, rows, index, grad, out, lse, sm_scale, sink, topk_length)
    return grads if rows is kv else (grads[0], grads[1].view(kv.shape), grads[2])


def save_sparse(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """`setup_context` of `sparse_attention`."""
    q, kv, indices, ctx.sm_scale, sink, topk_length = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, kv, indices, output[0], output[2], sink, topk_length)


def sparse_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    """The backward formula of `sparse_attention`."""
    q, kv, indices, out, lse, sink, topk_length = ctx.saved_tensors
    grad_q, grad_kv, grad_sink = sparse_attention_bwd(
        q, kv, indices, grad, out, lse, ctx.sm_scale, sink=sink, topk_length=topk_length
    )
    return grad_q, grad_kv.to(kv.dtype), None, None, None if sink is None else grad_sink, None


# ---- hca_attention_bwd ---------------------------------------------------------------------------

HcaGradients = tuple[Tensor, Tensor, Tensor, Tensor]


class HcaArguments(NamedTuple):
    q: Tensor
    window_kv: Tensor
    entries: Tensor | None
    grad: Tensor
    out: Tensor
    lse: Tensor
    sm_scale: float
    cu_seqlens: Tensor
    ratio: int
    window: int
    sink: Tensor | None

    def check(self) -> None:
        numbers = (self.cu_seqlens, self.ratio, self.window, self.sink)
        softmax.check_visible(self.q, self.window_kv, self.entries, self.sm_scale, *numbers)
        _check_results(self.q, self.grad, self.out, self.lse)
        count = self.q.shape[0] * self.num_slots
        if isinstance(count, int) and count > checks.MOST_SIZE:
            raise ValueError(
                "window_kv and entries must have lists of rows with up to "
                f"{checks.MOST_SIZE} elements, got {self.q.shape[0]} of {self.num_slots}"
            )

    def check_values(self) -> None:
        softmax.check_bounds(self.cu_seqlens, self.q.shape[0])

    @property
    def num_entries(self) -> int:
        """All compressed rows."""
        return 0 if self.entries is None else self.entries.shape[0]

    @property
    def num_slots(self) -> int:
        """The rows that a query may see at most."""
        return min(self.window, self.q.shape[0]) + self.num_entries

    def outputs(self) -> tuple[Out, Out, Out, Out]:
        channels = self.q.shape[2]
        return (
            Out("grad_q", self.q.shape, torch.bfloat16),
            Out("grad_window_kv", self.window_kv.shape, torch.float32),
            Out("grad_entries", (self.num_entries, channels), torch.float32),
            Out("grad_sink", (self.q.shape[1],), torch.float32),
        )

    def scratch(self) -> tuple[Out, ...]:
        num_tokens, num_rows = self.q.shape[0], self.q.shape[0] + self.num_entries
        return (
            Out("indices", (num_tokens, self.num_slots), torch.int32),
            Out("length", (num_tokens,), torch.int32),
            Out("rows", (num_rows, self.q.shape[2]), torch.bfloat16),
            Out("grad_rows", (num_rows, self.q.shape[2]), torch.float32),
            *_scratch(self.q, self.num_slots, num_rows),
        )

    def launches(
        self,
        grad_q: Spec,
        grad_window_kv: Spec,
        grad_entries: Spec,
        grad_sink: Spec,
        indices: Spec,
        length: Spec,
        rows: Spec,
        grad_rows: Spec,
        *scratch: Spec,
    ) -> list[Launch | Host]:
        if 0 in self.q.shape:
            return [Host(Tensor.zero_, (x,)) for x in (grad_entries, grad_sink)]
        bounds = (self.cu_seqlens, self.ratio, self.window, self.num_entries)
        return [
            Host(list_visible, (*bounds, indices, length)),
            Host(_join_rows, (rows, self.window_kv, self.entries)),
            *_launches(self, rows, indices, length, (grad_q, grad_rows, grad_sink), *scratch),
            Host(_split_rows, (grad_rows, grad_window_kv, grad_entries)),
        ]


def list_visible(
    cu_seqlens: Tensor, ratio: int, window: int, num_entries: int, indices: Tensor, length: Tensor
) -> None:
    """The rows that each token sees, of its window and then entries, without holes."""
    num_tokens, num_slots = indices.shape
    first, end = window_ranges(cu_seqlens, window, num_tokens)
    place = torch.arange(num_slots, dtype=torch.int32, device=indices.device)
    tokens = (end - first)[:, None]
    found, length[:] = first[:, None] + place, tokens[:, 0]
    if num_entries:
        start, stop = entry_ranges(cu_seqlens, ratio, num_tokens)
        length += (stop.clamp(max=num_entries) - start).clamp(min=0)
        found = torch.where(place < tokens, found, place - tokens + start[:, None] + num_tokens)
    indices.copy_(found)


def _join_rows(rows: Tensor, window_kv: Tensor, entries: Tensor | None) -> None:
    torch.cat([window_kv] if entries is None else [window_kv, entries], out=rows)


def _split_rows(grad_rows: Tensor, grad_window_kv: Tensor, grad_entries: Tensor) -> None:
    grad_window_kv.copy_(grad_rows[: grad_window_kv.shape[0]])
    grad_entries.copy_(grad_rows[grad_window_kv.shape[0] :])


def cost_hca(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    cu_seqlens: Tensor,
    ratio: int,
    window: int = 128,
    **_: Any,
) -> Cost:
    """As of the attention, with three more products; gradients are written once."""
    rows = window_kv.numel() + (0 if entries is None else entries.numel())
    pairs = softmax.visible_pairs(q, entries, cu_seqlens, ratio, window)
    return Cost(
        4 * q.numel() + q.shape[:2].numel() * (4 * VALUE_CHANNELS + 4) + 6 * rows,
        2 * q.shape[1] * pairs * (3 * q.shape[2] + 2 * VALUE_CHANNELS),
    )


def _hca_reference(*values: Any) -> HcaGradients:
    *arguments, cu_seqlens, ratio, window, sink = values
    return reference.hca_attention_bwd(
        *arguments, cu_seqlens=cu_seqlens, ratio=ratio, window=window, sink=sink
    )


HCA_ATTENTION_BWD = Operator(
    "attention.hca_attention_bwd",
    HcaArguments,
    reference=_hca_reference,
    cost=cost_hca,
    archs=(HOPPER,),
)


@HCA_ATTENTION_BWD.public(reference=reference.hca_attention_bwd)
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
) -> HcaGradients:
    """Computes the gradients of `hca_attention` from that of its result.

    They are those of `sparse_attention_bwd` for lists of the rows that each token sees, which are
    made here: `T * (window + E)` int32, and three times that to sort them. This is what autograd
    calls for `hca_attention`.

    Args:
        q: `[T, h, d]`, as in `hca_attention`.
        window_kv: `[T, d]`, as in `hca_attention`.
        entries: `[E, d]` or None, as in `hca_attention`.
        grad: `[T, h, 512]`, bfloat16: the gradient of `out`.
        out: `[T, h, 512]`, bfloat16: the result of `hca_attention`.
        lse: `[T, h]`, float32: its statistic.
        sm_scale: The factor of logits.
        cu_seqlens: `[B + 1]`, int32, as in `hca_attention`.
        ratio: As in `hca_attention`.
        window: As in `hca_attention`.
        sink: `[h]`, float32, as in `sparse_attention`.

    Returns:
        `(grad_q, grad_window_kv, grad_entries, grad_sink)`: bfloat16 with the shape of `q`, then
        float32 `[T, d]`, `[E, d]`, `[h]`. Without entries or sink theirs are empty or zero.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, a number is out of range, or
            `T * (window + E)` is not below `2**31`.

    Example:
        >>> from tile_kernels.attention import hca_attention
        >>> q, rows = torch.zeros(2, 1, 512).bfloat16(), torch.ones(2, 512).bfloat16()
        >>> where = {"cu_seqlens": torch.tensor([0, 2]).int(), "ratio": 0, "window": 2}
        >>> out, _, lse = hca_attention(q, rows, None, 1.0, **where, return_stats=True)
        >>> grads = hca_attention_bwd(q, rows, None, torch.ones_like(out), out, lse, 1.0, **where)
        >>> grads[1][:, 0].tolist()
        [1.5, 0.5]
    """
    return HCA_ATTENTION_BWD(
        q, window_kv, entries, grad, out, lse, sm_scale, cu_seqlens, ratio, window, sink
    )


def save_hca(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """`setup_context` of `hca_attention`."""
    q, window_kv, entries, ctx.sm_scale, cu_seqlens, ctx.ratio, ctx.window, sink = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, window_kv, entries, output[0], output[2], cu_seqlens, sink)


def hca_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    """The backward formula of `hca_attention`."""
    q, window_kv, entries, out, lse, cu_seqlens, sink = ctx.saved_tensors
    grad_q, grad_window_kv, grad_entries, grad_sink = hca_attention_bwd(
        q, window_kv, entries, grad, out, lse, ctx.sm_scale,
        cu_seqlens=cu_seqlens, ratio=ctx.ratio, window=ctx.window, sink=sink,
    )  # fmt: skip
    of_entries = None if entries is None else grad_entries.to(entries.dtype)
    of_sink = None if sink is None else grad_sink
    return grad_q, grad_window_kv.to(window_kv.dtype), of_entries, None, None, None, None, of_sink
