"""The weight of the norm, merged into the projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.modeling.mhc.main_grad import in_float32
from tile_kernels.modeling.mhc.once import differentiable_once


class _MergeNormWeight(torch.autograd.Function):
    """The weight of the norm, `[K]`, in the rows of the projection, `[J, K]`."""

    @staticmethod
    def forward(ctx: Any, fn: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(fn, weight)
        return fn * weight

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        fn, weight = ctx.saved_tensors
        fn_needed, weight_needed = ctx.needs_input_grad
        return (
            grad * weight if fn_needed else None,
            (grad * fn).sum(0) if weight_needed else None,
        )


def merged(names: tuple[str, str], fn: Tensor, weight: Tensor | None) -> Tensor:
    """`fn * weight` in float32, or `fn`; `names` are theirs, for messages about `main_grad`."""
    fn = in_float32(names[0], fn)
    if weight is None:
        return fn
    if weight.shape != fn.shape[1:]:
        raise ValueError(
            f"{names[1]} must have shape {list(fn.shape[1:])}, got {list(weight.shape)}"
        )
    result: Tensor = _MergeNormWeight.apply(fn, in_float32(names[1], weight))
    return result
