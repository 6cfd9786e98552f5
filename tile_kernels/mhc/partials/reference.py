"""References of what follows a projection whose sums come in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.mhc.apply.reference import mhc_pre_apply_mix
from tile_kernels.mhc.mix.reference import mhc_pre_split_mixes
from tile_kernels.mhc.sinkhorn.reference import sinkhorn_normalize


def _sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, never a view."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def mhc_reduce_partials(
    mul: Tensor, sqrsum: Tensor, rms_group_size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixes `[n, q]`, and the sums of products `[n, g, q]` and squares `[n, g]`.

    >>> mul = torch.tensor([[[[1.0, 2.0]]], [[[3.0, -1.0]]]])
    >>> squares = torch.tensor([[[4.0]], [[12.0]]])
    >>> mhc_reduce_partials(mul, squares, 8, 1e-6)[0]
    tensor([[2.8284, 0.7071]])
    """
    products, squares = _sum_in_order(mul), _sum_in_order(sqrsum)
    inverse = torch.rsqrt(squares / rms_group_size + eps)
    out = _sum_in_order((products * inverse[..., None]).transpose(0, 1))
    return out.contiguous(), products, squares


def mhc_reduce_partials_bwd(
    out_grad: Tensor, out_mul: Tensor, sqrsum: Tensor, rms_group_size: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of the sums of products and of squares.

    >>> out_mul, squares = torch.tensor([[[4.0, 1.0]]]), torch.tensor([[16.0]])
    >>> mhc_reduce_partials_bwd(torch.tensor([[1.0, 0.5]]), out_mul, squares, 8, 1e-6)
    (tensor([[[0.7071, 0.3536]]]), tensor([[-0.0994]]))
    """
    inverse = torch.rsqrt(sqrsum / rms_group_size + eps)
    grad = out_grad[:, None, :]
    mul_grad = grad * inverse[..., None]
    total = (grad * out_mul).sum(-1)
    return mul_grad, -0.5 * total * inverse / (sqrsum + eps * rms_group_size)


def mhc_pre_from_partials(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`post`, `comb` and layer input: `mhc_reduce_partials`, then the single steps."""
    m, h = residual.shape[-2:]
    mixes, _, _ = mhc_reduce_partials(
        gemm_out_mul[:, :, None], gemm_out_sqrsum[:, :, None], m * h, rms_eps
    )
    pre, post, logits = mhc_pre_split_mixes(
        mixes, mhc_scale, mhc_base, m, mhc_post_mult_value, mhc_pre_eps
    )
    comb = sinkhorn_normalize(logits, sinkhorn_repeat, mhc_sinkhorn_eps)
    return post, comb, mhc_pre_apply_mix(residual, pre)
