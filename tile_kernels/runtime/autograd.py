"""Errors of derivatives that do not exist, where PyTorch would lose them silently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def no_gradient_message(name: str, instead: str) -> str:
    """The error of a backward pass through an operator without a gradient."""
    if name.endswith("_bwd") or "_backward_" in name:
        return f"{name} has no gradient; it computes one itself, and there is no second derivative"
    choice = f"use {instead}, or " if instead else ""
    return (
        f"{name} has no gradient; {choice}call it under torch.no_grad() or with detached tensors "
        "if none is needed"
    )


def last_gradients(
    message: str, grads: Iterable[Tensor | None], inputs: Iterable[Tensor]
) -> tuple[Tensor | None, ...]:
    """`grads`, which raise with `message` if someone differentiates them again.

    For backward formulas whose operators have none themselves: under `create_graph=True` a second
    derivative would be missing without a word.
    """
    if not torch.is_grad_enabled():
        return tuple(grads)
    inputs = tuple(inputs)
    return tuple(
        None if grad is None else _LastGradient.apply(message, grad, *inputs) for grad in grads
    )


class _LastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, grad: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG004
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(ctx.message)


def refuse_tangents(name: str, values: Iterable[Any]) -> None:
    """Forward-mode derivatives would be lost without a word: PyTorch's custom ops have none."""
    if forward_ad._current_level < 0:
        return
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{name}: forward-mode derivatives are not supported; use reverse mode, or "
                "pass torch.autograd.forward_ad.unpack_dual(x).primal"
            )
