"""References of the Sinkhorn normalization and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn_normalize_ref(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Makes matrices nearly doubly stochastic.

    This computes `softmax` of rows plus `eps`, divides columns by their sums, and then normalizes
    rows and columns `repeat - 1` times; `eps` is added to every sum.

    Args:
        x: `[..., M, M]`: logits.
        repeat: The number of iterations.
        eps: The epsilon of the iterations.

    Returns:
        `[..., M, M]`.

    Example:
        >>> sinkhorn_normalize_ref(torch.zeros(2, 2), 1)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """As `sinkhorn_normalize_ref`, with sums of neighbours first.

    >>> sinkhorn_normalize(torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), 2)
    tensor([[0.3636, 0.6316],
            [0.6364, 0.3684]])
    """
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _steps(_softmax(x) + eps, repeat, eps)[-1][2].contiguous()


def sinkhorn_normalize_bwd(
    grad_out: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6
) -> Tensor:
    """The gradient of the logits; every step is computed again.

    A step `y' = y / d` with `d = sum(y) + eps` has the gradient `(g - sum(g * y')) / d`, the
    softmax `p` has `(g - sum(g * p)) * p`.

    >>> x, grad = torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0, 0]])
    >>> sinkhorn_normalize_bwd(grad, x, 2)
    tensor([[ 0.1240, -0.1240],
            [-0.1198,  0.1198]])
    """
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    p = _softmax(x)
    grad = grad_out
    for dim, divisor, y in reversed(_steps(p + eps, repeat, eps)):
        grad = (grad - _tree_sum(grad * y, dim)) / divisor
    return ((grad - _tree_sum(grad * p, -1)) * p).contiguous()


def _softmax(x: Tensor) -> Tensor:
    exponentials = torch.exp(x - x.amax(-1, keepdim=True))
    return exponentials / _tree_sum(exponentials, -1)


def _steps(y: Tensor, repeat: int, eps: float) -> list[tuple[int, Tensor, Tensor]]:
    """Every normalization: its dimension, its divisor and its result."""
    steps = []
    for dim in [-2, *[-1, -2] * (repeat - 1)]:
        divisor = _tree_sum(y, dim) + eps
        y = y / divisor
        steps.append((dim, divisor, y))
    return steps


def _tree_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, neighbours first, then neighbouring sums; `dim` is kept."""
    parts = list(x.split(1, dim))
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])] + odd
    return parts[0]
