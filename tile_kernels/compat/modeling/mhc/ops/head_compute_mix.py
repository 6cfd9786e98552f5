"""The mixes of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.modeling.mhc.main_grad import in_float32
from tile_kernels.modeling.mhc.once import differentiable_once


class MHCHeadComputeMix(torch.autograd.Function):
    """`mhc_head_compute_mix`, whose arguments `apply` takes in order."""

    @staticmethod
    def forward(
        ctx: Any, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
    ) -> Tensor:
        """The weights of the streams; only the arguments are kept."""
        ctx.save_for_backward(input_mix, mhc_scale, mhc_base)
        return mhc.mhc_head_compute_mix(input_mix, mhc_scale, mhc_base, mhc_pre_eps)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the three tensors."""
        return *mhc.mhc_head_compute_mix_bwd(grad, *ctx.saved_tensors), None


def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """Computes `sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps` in float32.

    If `mhc_scale` or `mhc_base` has a `main_grad`, its gradient is added there.

    Args:
        input_mix: `[..., m]`, float32.
        mhc_scale: `[1]`, float32.
        mhc_base: `[m]`, float32.
        mhc_pre_eps: A number that is added.

    Returns:
        `[..., m]`, float32.

    Example:
        >>> one = torch.ones(1)
        >>> mhc_head_compute_mix(torch.tensor([0.0, 1.0]), 2 * one, torch.tensor([0.0, -2.0]), 0.01)
        tensor([0.5100, 0.5100])
    """
    result: Tensor = MHCHeadComputeMix.apply(
        input_mix.contiguous(), in_float32("mhc_scale", mhc_scale),
        in_float32("mhc_base", mhc_base), mhc_pre_eps,
    )  # fmt: skip
    return result
