"""Gradients that have no gradient of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.runtime.autograd import last_gradients

_MESSAGE = "tile_kernels.modeling.mhc: there are no second derivatives"

Backward = Callable[..., tuple[Tensor | None, ...]]


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
        return last_gradients(_MESSAGE, grads, inputs)

    return outer
