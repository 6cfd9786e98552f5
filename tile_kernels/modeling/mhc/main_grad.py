"""Parameters whose gradient is added to a float32 buffer of the training framework."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.modeling.mhc.once import differentiable_once


class _IntoMainGrad(torch.autograd.Function):
    """A parameter in float32, its gradient added to `main_grad` instead of returned."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.float()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grad)
        return None, None


def in_float32(name: str, parameter: Tensor) -> Tensor:
    """The parameter for the operators, which take float32; looks for `main_grad` on it.

    If it has one now that is not None, a float32 buffer of the parameter's shape, the gradient will
    be added there in place, and the parameter gets no `.grad`. A compiled graph cannot do that: it
    raises.

    >>> scale = torch.ones(3, requires_grad=True)
    >>> scale.main_grad = torch.ones(3)
    >>> (2 * in_float32("scale", scale)).sum().backward()
    >>> scale.grad, scale.main_grad
    (None, tensor([3., 3., 3.]))
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter if parameter.dtype is torch.float32 else parameter.float()
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} has a main_grad, which a compiled graph cannot add to")
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"main_grad of {name} must be a tensor, got {type(main_grad).__name__}")
    if main_grad.shape != parameter.shape or main_grad.dtype != torch.float32:
        raise ValueError(
            f"main_grad of {name} must be float32 {list(parameter.shape)}, got {main_grad.dtype} "
            f"{list(main_grad.shape)}"
        )
    result: Tensor = _IntoMainGrad.apply(parameter, main_grad)
    return result
