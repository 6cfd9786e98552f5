"""`mhc_post` as an autograd function that tells which gradient it computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.modeling.mhc.once import differentiable_once


class Computed:
    """The gradient of the residual that a backward pass computed, for another to identify it."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


class MHCPost(torch.autograd.Function):
    """`mhc_post`, whose arguments `apply` takes in order.

    The gradient of the residual is also stored in `computed`, if that is given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        post_layer_mix: Tensor,
        comb_res_mix: Tensor,
        out: Tensor | None = None,
        computed: Computed | None = None,
    ) -> Tensor:
        """The next residual; only the arguments are saved."""
        ctx.save_for_backward(x, residual, post_layer_mix, comb_res_mix)
        ctx.computed = computed
        return mhc.mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix, out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the four tensors."""
        x, residual, post, comb = ctx.saved_tensors
        grads = mhc.mhc_post_bwd(x, residual, post, comb, grad)
        if ctx.computed is not None:
            ctx.computed.gradient = grads[1]
        return *grads, None, None
