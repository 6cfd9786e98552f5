"""Entering the streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.modeling.mhc.once import differentiable_once


class ExpandToMHCFn(torch.autograd.Function):
    """`expand_to_mhc`, whose arguments `apply` takes in order."""

    @staticmethod
    def forward(_: Any, hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
        """Every stream a copy."""
        return mhc.expand_to_mhc(hidden, mhc_mult, out)

    @staticmethod
    @differentiable_once
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The sum of the streams."""
        return mhc.expand_to_mhc_bwd(grad), None, None


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Computes `tile_kernels.mhc.expand_to_mhc`, which can write to `out` in training too.

    Args:
        hidden: `[..., h]`, bfloat16.
        mhc_mult: The number of streams `m`.
        out: A buffer for the result, or None.

    Returns:
        `[..., m, h]`, bfloat16; a view of `out` if it is given.

    Example:
        >>> hidden = torch.tensor([0.0, 1.0, 2.0]).bfloat16().requires_grad_()
        >>> expand_to_mhc(hidden, 2).backward(torch.tensor([[1.0, 2, 3], [4, 5, 6]]).bfloat16())
        >>> hidden.grad.tolist()
        [5.0, 7.0, 9.0]
    """
    result: Tensor = ExpandToMHCFn.apply(hidden, mhc_mult, out)
    return result
