"""A feed-forward layer with SwiGLU whose two input projections have separate weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tile_kernels import quant
from tile_kernels.modeling.bf16_experts import in_autocast_dtype, without_autocast
from tile_kernels.modeling.fp8_experts import needs_gradients
from tile_kernels.runtime import checks

__all__ = ["swiglu_mlp"]

_FMT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def swiglu_mlp(
    x: Tensor, gate: Tensor, value: Tensor, down: Tensor, clamp_value: float | None = None
) -> Tensor:
    """`down @ (silu(gate @ x) * (value @ x))`, with gradients.

    Both projections write into one buffer, so that the activation is one kernel on it, in float32
    and rounded once. Only that buffer and `x` are kept for the backward pass. With a clamp value
    `c` the projections are first limited: `min(gate, c)` and `min(max(value, -c), c)`. Where
    autocast is enabled, the products are computed in its dtype.

    Args:
        x: `[..., hidden]`, bfloat16 or float32.
        gate: `[intermediate, hidden]`, dtype of `x`.
        value: `[intermediate, hidden]`, dtype of `x`.
        down: `[hidden, intermediate]`, dtype of `x`.
        clamp_value: The clamp value, at least 0, or None.

    Returns:
        `[..., hidden]`, dtype of `x`, or that of autocast.

    Raises:
        TypeError: If `x` has another dtype.
        ValueError: If a shape differs.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.eye(2)
        >>> swiglu_mlp(x, weight, weight, weight)
        tensor([[0.7311, 3.5232]])
    """
    x, gate, value, down = in_autocast_dtype(x, gate, value, down)
    with checks.named("swiglu_mlp"):
        if x.dtype not in _FMT:
            raise TypeError(f"x must be bfloat16 or float32, got {x.dtype}")
        hidden, intermediate = x.shape[-1], gate.shape[0]
        for name, weight, shape in (
            ("gate", gate, (intermediate, hidden)),
            ("value", value, (intermediate, hidden)),
            ("down", down, (hidden, intermediate)),
        ):
            if tuple(weight.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(weight.shape)}")
    rows = x.reshape(-1, hidden)
    with without_autocast(x):
        if needs_gradients(rows, gate, value, down):
            y: Tensor = _SwiGLU.apply(rows, gate, value, down, clamp_value)
        else:
            y = _forward(rows, gate, value, down, clamp_value)[0]
    return y.view(x.shape)


def _forward(
    x: Tensor, gate: Tensor, value: Tensor, down: Tensor, clamp_value: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and both projections next to each other."""
    width = gate.shape[0]
    h = x.new_empty(len(x), 2 * width)
    torch.mm(x, gate.t(), out=h[:, :width])
    torch.mm(x, value.t(), out=h[:, width:])
    z = quant.swiglu_forward(h, _FMT[h.dtype], clamp_value=clamp_value)
    return z @ down.t(), h


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, value: Tensor, down: Tensor, clamp_value: float | None
    ) -> Tensor:
        y, h = _forward(x, gate, value, down, clamp_value)
        ctx.save_for_backward(x, h, gate, value, down)
        ctx.clamp_value = clamp_value
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, h, gate, value, down = ctx.saved_tensors
        needs_x, needs_gate, needs_value, needs_down = ctx.needs_input_grad[:4]
        grad_x = grad_gate = grad_value = grad_down = None
        with without_autocast(x):
            grad_z = grad_y @ down
            grad_h, *z = quant.swiglu_backward(
                h, grad_z, _FMT[h.dtype], clamp_value=ctx.clamp_value, do_recompute=needs_down
            )
            left, right = grad_h.chunk(2, dim=1)
            if needs_down:
                grad_down = grad_y.t() @ z[0]
            if needs_gate:
                grad_gate = left.t() @ x
            if needs_value:
                grad_value = right.t() @ x
            if needs_x:
                grad_x = torch.addmm(left @ gate, right, value)
        return grad_x, grad_gate, grad_value, grad_down, None
