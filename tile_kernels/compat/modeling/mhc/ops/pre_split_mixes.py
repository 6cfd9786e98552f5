"""The mixes of a sublayer from their projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.modeling.mhc.main_grad import in_float32
from tile_kernels.modeling.mhc.once import differentiable_once


class MHCPreSplitMixes(torch.autograd.Function):
    """`mhc_pre_split_mixes`, whose arguments `apply` takes in order."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`pre`, `post` and the logits of `comb`; only the arguments are kept."""
        *tensors, _, ctx.post_mult, _ = arguments
        ctx.save_for_backward(*tensors)
        return mhc.mhc_pre_split_mixes(*arguments)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of the three tensors."""
        arguments: list[Any] = [*grads, *ctx.saved_tensors, ctx.post_mult]
        return *mhc.mhc_pre_split_mixes_bwd(*arguments), None, None, None


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits mixes into `pre`, `post` and the logits of `comb`:
    `tile_kernels.mhc.mhc_pre_split_mixes`.

    If `mhc_scale` or `mhc_base` has a `main_grad`, its gradient is added there.

    Args:
        input_mixes: `[..., m * (m + 2)]`, float32.
        mhc_scale: `[3]`, float32.
        mhc_base: `[m * (m + 2)]`, float32.
        mhc_mult: The number of streams `m`.
        mhc_post_mult_value: The factor of the sigmoid of `post`.
        mhc_pre_eps: A number that is added to `pre`.

    Returns:
        `pre` and `post` `[..., m, 1]`, and logits `[..., m, m]`, float32.

    Example:
        >>> pre, post, comb = mhc_pre_split_mixes(
        ...     torch.zeros(1, 8), torch.ones(3), torch.zeros(8), 2, 2.0, 0.0
        ... )
        >>> pre.flatten().tolist(), post.flatten().tolist(), comb.shape
        ([0.5, 0.5], [1.0, 1.0], torch.Size([1, 2, 2]))
    """
    result: tuple[Tensor, Tensor, Tensor] = MHCPreSplitMixes.apply(
        input_mixes.contiguous(), in_float32("mhc_scale", mhc_scale),
        in_float32("mhc_base", mhc_base), mhc_mult, mhc_post_mult_value, mhc_pre_eps,
    )  # fmt: skip
    return result
