"""Nearly doubly stochastic matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.modeling.mhc.once import differentiable_once


class _SinkhornNormalize(torch.autograd.Function):
    """`sinkhorn_normalize`, whose arguments `apply` takes in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, repeat: int, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.steps = repeat, eps
        return mhc.sinkhorn_normalize(x, repeat, eps)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return mhc.sinkhorn_normalize_bwd(grad, *ctx.saved_tensors, *ctx.steps), None, None


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Makes matrices nearly doubly stochastic: `tile_kernels.mhc.sinkhorn_normalize`.

    Args:
        x: `[..., M, M]`, float32: logits.
        repeat: The number of iterations.
        eps: The epsilon of the iterations.

    Returns:
        `[..., M, M]`, float32.

    Example:
        >>> sinkhorn_normalize(torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), 2)
        tensor([[0.3636, 0.6316],
                [0.6364, 0.3684]])
    """
    result: Tensor = _SinkhornNormalize.apply(x, repeat, eps)
    return result
