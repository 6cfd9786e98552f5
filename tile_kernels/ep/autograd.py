"""Dispatch and combine as each other's gradient.

The gradient of sending a token to several ranks is the sum of what comes back from them, which is
combine; that of a sum is to send its gradient to all that took part, which is dispatch along
the same routing. Both happen on all ranks, in the order in which autograd runs backwards, so every
rank must use the results alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Function

from tile_kernels.ep.exchange import Dispatched
from tile_kernels.ep.handle import EPHandle

if TYPE_CHECKING:
    from tile_kernels.ep.buffer import ElasticBuffer

Outputs = tuple["Tensor | None", ...]


class DispatchFn(Function):
    """Payloads `[T, width]` and weights to what this rank receives."""

    @staticmethod
    def forward(
        ctx: Any,
        buffer: ElasticBuffer,
        run: Callable[[], Dispatched],
        results: list[Dispatched],
        topk_weights: Tensor | None,
        *payloads: Tensor,
    ) -> Outputs:
        """Run the dispatch; the result is appended to `results`."""
        result = run()
        results.append(result)
        ctx.buffer, ctx.handle = buffer, result.handle
        ctx.weights_need_grad = topk_weights is not None and topk_weights.requires_grad
        constant = [out for out, given in zip(result.payloads, payloads) if not given.requires_grad]
        if result.topk_weights is not None and not ctx.weights_need_grad:
            constant.append(result.topk_weights)
        ctx.mark_non_differentiable(*constant)
        return (result.topk_weights, *result.payloads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Outputs:
        """Combine the gradients of the rows; those of the weights are sent with the first."""
        grad_weights, *grad_payloads = grads
        needed = ctx.needs_input_grad[4:]
        weights = grad_weights if ctx.weights_need_grad else None
        back_weights: Tensor | None = None
        back: list[Tensor | None] = []
        for grad, needs_grad in zip(grad_payloads, needed):
            if not needs_grad:
                back.append(None)
                continue
            total, found, _ = ctx.buffer.combine(grad, ctx.handle, topk_weights=weights)
            back.append(total)
            back_weights, weights = (found, None) if weights is not None else (back_weights, None)
        if weights is not None:  # only the weights need gradients
            empty = weights.new_empty((grad_payloads[0].shape[0], 0))
            back_weights = ctx.buffer.combine(empty, ctx.handle, topk_weights=weights)[1]
        return (None, None, None, back_weights, *back)


class CombineFn(Function):
    """Rows in the layout of the handle to sums `[T, H]`, with weights `[T, K]`."""

    @staticmethod
    def forward(
        ctx: Any,
        buffer: ElasticBuffer,
        run: Callable[[], tuple[Tensor, Tensor | None]],
        handle: EPHandle,
        x: Tensor,
        topk_weights: Tensor | None,
        *bias: Tensor,
    ) -> Outputs:
        """Run the combine."""
        ctx.buffer, ctx.handle = buffer, handle
        combined, weights = run()
        constant = [] if any(each.requires_grad for each in (x, *bias)) else [combined]
        if topk_weights is not None and weights is not None and not topk_weights.requires_grad:
            constant.append(weights)
        ctx.mark_non_differentiable(*constant)
        return combined, weights

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Outputs:
        """Dispatch the gradient along the same routing; a bias has that of the sum itself."""
        grad, grad_weights = grads
        for_x, for_weights, *for_bias = ctx.needs_input_grad[3:]
        grad_x = back_weights = None
        if for_x or for_weights:
            weights = grad_weights.contiguous() if for_weights else None
            rows = grad if for_x else grad[:, :0]
            received, ids, back_weights, _, _ = ctx.buffer.dispatch(
                rows.contiguous(), topk_weights=weights, handle=ctx.handle
            )
            grad_x = received if for_x else None
            if back_weights is not None and ids is not None:
                back_weights = back_weights * (ids >= 0)  # combine reads only local slots
        return (None, None, None, grad_x, back_weights, *(grad if b else None for b in for_bias))
