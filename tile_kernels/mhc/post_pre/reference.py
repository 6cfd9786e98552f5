"""References of the step between two sublayers."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.mhc.post.reference import mhc_post
from tile_kernels.mhc.pre.reference import mhc_pre_big_fuse
from tile_kernels.quant.casting import quantize
from tile_kernels.quant.formats import E4M3
from tile_kernels.quant.norm.reference import norm_forward
from tile_kernels.quant.types import QuantTensor, ScaleFlags

PostPre = tuple[Tensor, Tensor, Tensor, Tensor]


def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> PostPre:
    """The next residual, and `post`, `comb` and layer input of `mhc_pre_big_fuse` of it.

    >>> x, one = torch.ones(1, 8).bfloat16(), torch.ones(1, 1, 1)
    >>> numbers = torch.ones(3), torch.tensor([0.0, 0.0, 5.0]), 1e-6, 0.0, 1e-6, 2.0, 3
    >>> residual, *_, layer_input = mhc_post_pre(x, x[None], one, one, torch.zeros(3, 8), *numbers)
    >>> residual[0, 0, 0].item(), layer_input[0, 0].item()
    (2.0, 1.0)
    """
    written = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    post, comb, layer_input = mhc_pre_big_fuse(
        written, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
        mhc_post_mult_value, sinkhorn_repeat,
    )  # fmt: skip
    if norm_weight is not None:
        layer_input = norm_forward(layer_input, norm_weight, norm_eps)[0]
    return written, post, comb, layer_input


def mhc_post_pre_and_per_token_cast(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    num_per_channels: int = 128,
    round_sf: bool = False,
    amax_min: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, QuantTensor]:
    """`mhc_post_pre` with the layer input in e4m3, a scale for `num_per_channels` channels.

    >>> x, one = torch.ones(1, 8).bfloat16(), torch.ones(1, 1, 1)
    >>> numbers = torch.ones(3), torch.tensor([0.0, 0.0, 5.0]), 1e-6, 0.0, 1e-6, 2.0, 3
    >>> *_, (data, sf) = mhc_post_pre_and_per_token_cast(
    ...     x, x[None], one, one, torch.zeros(3, 8), *numbers, num_per_channels=16
    ... )
    >>> data[0, 0].item(), round(1 / sf.item(), 3)
    (448.0, 448.0)
    """
    written, post, comb, layer_input = mhc_post_pre(
        x, residual, post_layer_mix, comb_res_mix, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps,
        mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps,
    )  # fmt: skip
    rows = layer_input.reshape(-1, layer_input.shape[-1]).float()
    data, sf = quantize(rows, E4M3, (1, num_per_channels), ScaleFlags(round_sf), amax_min)
    leading = layer_input.shape[:-1]
    data = data.view(torch.uint8).view(layer_input.shape).view(data.dtype)
    return written, post, comb, (data, sf.reshape(*leading, sf.shape[-1]))
