"""Gradients that have no gradient of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


class _Last(torch.autograd.Function):
    """A gradient that cannot be differentiated, and says so if someone tries."""

    @staticmethod
    def forward(_: Any, grad: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG004
        return grad.view_as(grad)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> None:  # noqa: ARG004
        raise RuntimeError("tile_kernels.modeling.mhc: there are no second derivatives")


def differentiable_once(backward: Backward) -> Backward:
    """A backward of an autograd function whose gradients raise if they are differentiated.

    PyTorch's `once_differentiable` says nothing where only the saved tensors are trained.
    """

    @functools.wraps(backward)
    def outer(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *given)
        with torch.no_grad():
            grads = backward(ctx, *given)
        inputs = [grad for grad in given if grad is not None]
        inputs += ctx.saved_tensors
        return tuple(None if grad is None else _Last.apply(grad, *inputs) for grad in grads)

    return outer
