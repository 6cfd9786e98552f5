"""What a sublayer reads of the streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.compat.modeling.mhc.ops import storage
from tile_kernels.modeling.mhc.once import differentiable_once


class MHCPreApplyMix(torch.autograd.Function):
    """`mhc_pre_apply_mix`, whose arguments `apply` takes in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
        """The weighted sum of the streams."""
        ctx.save_for_backward(x, mix)
        return mhc.mhc_pre_apply_mix(x, mix, out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """That of the streams is added to the shared gradient, if there is one."""
        x, mix = ctx.saved_tensors
        shared = storage.find(x)
        grad_x, grad_mix = mhc.mhc_pre_apply_mix_bwd(grad, x, mix, shared)
        return grad_x if shared is None else None, grad_mix, None


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes the weighted sum of the streams.

    In the backward pass, if the storage of `x` has an attribute `grad_from_mhc_post`, the gradient
    of `x` is added to that in place and autograd gets None.

    Args:
        x: `[..., m, h]`, bfloat16.
        mix: `[..., m, 1]`, float32.
        out: A buffer for the result, or None.

    Returns:
        `[..., h]`, bfloat16; a view of `out` if it is given.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()
        >>> mhc_pre_apply_mix(x, torch.tensor([[0.25], [0.5]])).tolist()
        [1.75, 2.5]
    """
    result: Tensor = MHCPreApplyMix.apply(x, mix, out)
    return result
