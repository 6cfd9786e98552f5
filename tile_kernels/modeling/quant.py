"""Quantized activations in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import quant
from tile_kernels.quant.types import QuantTensor

_GROUPS = (32, 128)


class SwiGLUCastFn(torch.autograd.Function):
    """SwiGLU whose input is kept in e4m3 and whose output is e4m3; see `swiglu_cast`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor,
        pos_to_token_topk: Tensor,
        token_topk_to_pos: Tensor,
        num_per_channels: int,
        round_sf: bool,
        swiglu_clamp_value: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rounded activations, and with them their codes and scales."""
        data, sf = quant.swiglu_forward_and_per_token_cast(
            x, "e4m3", num_per_channels, pos_to_token_topk, topk_weights, round_sf=round_sf,
            swiglu_clamp_value=swiglu_clamp_value,
        )  # fmt: skip
        kept = quant.per_token_cast(x, "e4m3", num_per_channels)
        ctx.save_for_backward(*kept, topk_weights, pos_to_token_topk, token_topk_to_pos)
        ctx.settings = (num_per_channels, round_sf, swiglu_clamp_value)
        ctx.mark_non_differentiable(data, sf)
        return quant.per_token_cast_back((data, sf), "bf16", num_per_channels), data, sf

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """One kernel gives the gradients of the rows and of the weights."""
        data, sf, weights, pos_to_token_topk, token_topk_to_pos = ctx.saved_tensors
        _, _, x_grad, weight_grad = quant.swiglu_backward_and_per_token_cast(
            (data, sf), grads[0].contiguous(), weights, pos_to_token_topk, token_topk_to_pos,
            *ctx.settings,
        )  # fmt: skip
        return x_grad, weight_grad, None, None, None, None, None


def swiglu_cast(
    x: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    num_per_channels: int = 128,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, QuantTensor]:
    """Computes SwiGLU with an e4m3 result, for training.

    The result is `silu(gate) * value * weight`, rounded to e4m3 with scales of groups of channels.
    It is differentiable in `x` and `topk_weights`; gradients ignore the rounding. For the backward
    pass `x` is saved in e4m3, a quarter of what autograd would save for the formula, so that
    gradients have the precision of e4m3 too.

    Args:
        x: `[num_rows, 2 * hidden]`, bfloat16: gates, then values.
        topk_weights: `[num_tokens, num_topk]`, float32, or None.
        pos_to_token_topk: `[num_rows]`, int32, of `moe.get_fused_mapping`; required with weights.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32, of `moe.get_fused_mapping`; required
            with weights.
        num_per_channels: Channels per scale, 32 or 128; it divides `hidden`.
        round_sf: Whether scales are rounded up to powers of two.
        swiglu_clamp_value: The clamp of gates and values, as in
            `quant.swiglu_forward_and_per_token_cast`, or None.

    Returns:
        `y` `[num_rows, hidden]`, bfloat16, the rounded activations; and `(data, scales)`, the same
        in e4m3 for a matrix product.

    Example:
        >>> x = torch.randn(4, 256).bfloat16().requires_grad_()
        >>> y, (data, scales) = swiglu_cast(x)
        >>> y.float().sum().backward()
        >>> y.shape, data.dtype, x.grad.shape
        (torch.Size([4, 128]), torch.float8_e4m3fn, torch.Size([4, 256]))
    """
    if num_per_channels not in _GROUPS:
        raise ValueError(f"swiglu_cast: num_per_channels must be 32 or 128, got {num_per_channels}")
    maps = (topk_weights, pos_to_token_topk, token_topk_to_pos)
    if any(given is None for given in maps):
        if any(given is not None for given in maps):
            raise ValueError(
                "swiglu_cast: topk_weights, pos_to_token_topk and token_topk_to_pos must be given "
                "together"
            )
        pos_to_token_topk = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        token_topk_to_pos = pos_to_token_topk[:, None].contiguous()
        topk_weights = torch.ones(x.shape[0], 1, device=x.device)
    y, data, sf = SwiGLUCastFn.apply(
        x, topk_weights, pos_to_token_topk, token_topk_to_pos, num_per_channels, round_sf,
        swiglu_clamp_value,
    )  # fmt: skip
    return y, (data, sf)
