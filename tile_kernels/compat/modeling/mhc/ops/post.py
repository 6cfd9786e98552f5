"""What a sublayer writes to the streams."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tile_kernels import mhc
from tile_kernels.compat.modeling.mhc.ops import storage
from tile_kernels.modeling.mhc import post
from tile_kernels.modeling.mhc.once import differentiable_once

mhc_post_fwd = mhc.mhc_post_fwd


class MHCPost(post.MHCPost):
    """`mhc_post`; the gradient of the residual is also left on its storage."""

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the four tensors."""
        x, residual, post_mix, comb = ctx.saved_tensors
        shared = ctx.needs_input_grad[1]
        return *mhc_post_bwd(x, residual, post_mix, comb, grad, shared), None, None


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the next residual from the output of a sublayer.

    The result is `out[j] = post[j] * x + sum_i comb[i, j] * residual[i]`. In the backward pass, the
    gradient of `residual` is returned to autograd and is also stored as the attribute
    `grad_from_mhc_post` of the storage of `residual`, where `mhc_pre_apply_mix` and
    `mhc_pre_norm_fn` add theirs.

    Args:
        x: `[..., h]`, bfloat16: the output of the sublayer.
        residual: `[..., m, h]`, bfloat16.
        post_layer_mix: `[..., m, 1]`, float32.
        comb_res_mix: `[..., m, m]`, float32.
        out: A buffer for the result, or None.

    Returns:
        `[..., m, h]`, bfloat16; a view of `out` if it is given.

    Example:
        >>> import torch
        >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> mhc_post(x.bfloat16(), residual.bfloat16(), post, comb).tolist()
        [[12.25, 23.5], [6.75, 12.5]]
    """
    result: Tensor = MHCPost.apply(x, residual, post_layer_mix, comb_res_mix, out)
    return result


def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of the four arguments of `mhc_post`: `tile_kernels.mhc.mhc_post_bwd`.

    Args:
        x: As in `mhc_post`.
        residual: As in `mhc_post`.
        post_layer_mix: As in `mhc_post`.
        comb_res_mix: As in `mhc_post`.
        d_o: `[..., m, h]`, bfloat16: the gradient of the result.
        fuse_grad_acc: Whether the gradient of `residual` is also stored as the attribute
            `grad_from_mhc_post` of the storage of `residual`.

    Example:
        >>> import torch
        >>> x, residual = torch.ones(2).bfloat16(), torch.ones(1, 2).bfloat16()
        >>> grads = mhc_post_bwd(x, residual, torch.ones(1, 1), torch.ones(1, 1), residual)
        >>> residual.untyped_storage().grad_from_mhc_post.tolist()
        [[[1.0, 1.0]]]
    """
    grads = mhc.mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, d_o)
    if fuse_grad_acc:
        storage.leave(residual, grads[1])
    return grads
