"""The projection of the streams to their mixes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.compat.modeling.mhc.ops import storage
from tile_kernels.modeling.mhc.norm_weight import merged
from tile_kernels.modeling.mhc.once import differentiable_once


class MHCPreNormFn(torch.autograd.Function):
    """`mhc_pre_norm_fn` without the weight of the norm."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, fn: Tensor, eps: float, fuse_grad_acc: bool = True
    ) -> Tensor:
        """The mixes; products and sums of squares are kept with the arguments."""
        mixes, mul, s = mhc.mhc_norm_fn_fwd(residual, fn, eps)
        ctx.save_for_backward(residual, fn, mul, s)
        ctx.eps, ctx.fuse_grad_acc = eps, fuse_grad_acc
        return mixes

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """That of the residual completes the shared gradient, if there is one."""
        residual, fn, mul, s = ctx.saved_tensors
        shared = storage.find(residual) if ctx.fuse_grad_acc else None
        grad_residual, grad_fn = mhc.mhc_norm_fn_bwd(grad, residual, fn, mul, s, ctx.eps, shared)
        if shared is None:
            return grad_residual, grad_fn, None, None
        storage.remove(residual)
        return None, grad_fn, None, None


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,  # noqa: ARG001
) -> Tensor:
    """Computes the mixes of each token: its RMS norm, projected.

    In the backward pass, if `fuse_grad_acc` is set and the storage of `residual` has an attribute
    `grad_from_mhc_post`, the gradient of `residual` is added to that in place, the attribute is
    deleted, and autograd gets None; without the attribute autograd gets the gradient. If `mhc_fn`
    or the weight has a `main_grad` in the forward pass, its gradient is added there.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous; `h` is a multiple of 8.
        mhc_fn: `[J, m * h]`, float32.
        mhc_norm_weight: `[m * h]`, float32, or None.
        mhc_norm_eps: The epsilon of the norm.
        fuse_grad_acc: Whether the attribute `grad_from_mhc_post` is used.
        n_splits: Has no effect: the sizes and the device decide.

    Returns:
        `[..., J]`, float32.

    Example:
        >>> residual = torch.ones(1, 2, 8).bfloat16()
        >>> mhc_pre_norm_fn(residual, torch.full((3, 16), 0.25), None, 0.0).tolist()
        [[4.0, 4.0, 4.0]]
    """
    fn = merged(("mhc_fn", "mhc_norm_weight"), mhc_fn, mhc_norm_weight)
    result: Tensor = MHCPreNormFn.apply(residual, fn, mhc_norm_eps, fuse_grad_acc)
    return result
