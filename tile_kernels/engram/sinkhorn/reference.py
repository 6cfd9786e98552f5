"""References of the steps of the table optimizer.

The update of a table is the momentum of its gradient with rows and columns scaled to a norm in
turn. The matrix `M` itself is only read: `x = (r M) c` with scales of rows `r` and of columns `c`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import fused_multiply_add


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """The new momentum, also written to the buffer in its dtype; with `nesterov` a step ahead.

    >>> buffer = torch.tensor([0.5, 1.0])
    >>> engram_sinkhorn_momentum_update(torch.tensor([1.0, -2.0]), buffer, 0.9), buffer
    (tensor([0.5950, 0.4300]), tensor([0.5500, 0.7000]))
    """
    g = grad.float()
    beta, rest = (torch.tensor(x, dtype=torch.float32, device=g.device) for x in (beta1, 1 - beta1))
    moment = fused_multiply_add(momentum_buffer.float(), beta, rest * g)
    momentum_buffer.copy_(moment)
    return fused_multiply_add(g, rest, beta * moment) if nesterov else moment


def _scaled(matrix: Tensor, row_scale: Tensor, col_scale: Tensor) -> Tensor:
    return (row_scale[:, None] * matrix) * col_scale


def engram_sinkhorn_step(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, num_parts: int = 512
) -> tuple[Tensor, Tensor]:
    """Scales rows to norm 1, and sums the squares of columns.

    A row of zeros keeps its scale. Part `p` of the sums consists of the rows from `p * V //
    num_parts` to the next such number.

    Args:
        num_parts: The number of partial sums; the operator chooses it.

    Returns:
        The norms of rows and the partial sums; `row_scale` is updated in place.

    Example:
        >>> matrix, scale = torch.tensor([[3.0, -4.0], [0.0, 0.0]]), torch.ones(2)
        >>> norms, partial = engram_sinkhorn_step(matrix, scale, torch.ones(2), 0.0)
        >>> norms, scale, partial.sum(0)
        (tensor([5., 0.]), tensor([0.2000, 1.0000]), tensor([0.3600, 0.6400]))
    """
    norms = torch.linalg.vector_norm(_scaled(matrix, row_scale, col_scale), dim=1)
    row_scale.copy_(torch.where(norms == 0, row_scale, row_scale * (1 / (norms + eps))))
    squares = _scaled(matrix, row_scale, col_scale).square()
    rows = matrix.shape[0]
    starts = torch.arange(1, num_parts, device=matrix.device) * rows // num_parts
    part = torch.bucketize(torch.arange(rows, device=matrix.device), starts, right=True)
    partial = matrix.new_zeros(num_parts, matrix.shape[1]).index_add(0, part, squares)
    return norms, partial


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Writes the sum of all parts, in their order, to `col_sumsq`.

    >>> sums = torch.empty(2)
    >>> engram_sinkhorn_step_reduce(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), sums)
    >>> sums
    tensor([4., 6.])
    """
    total = torch.zeros_like(col_sumsq)
    for part in col_sumsq_partial:
        total = total + part
    col_sumsq.copy_(total)


def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float
) -> Tensor:
    """The scaled matrix with rows of norm `alpha`; rows of zeros stay zeros.

    >>> matrix = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    >>> engram_sinkhorn_finalize(matrix, torch.ones(2), torch.ones(2), 0.0, 10.0)
    tensor([[ 6., -8.],
            [ 0.,  0.]])
    """
    x = _scaled(matrix, row_scale, col_scale)
    norms = torch.linalg.vector_norm(x, dim=1)
    scale = torch.tensor(alpha, dtype=torch.float32, device=x.device)
    factor = torch.where(norms == 0, 0.0, scale / (norms + eps))
    return torch.where((norms == 0)[:, None], 0.0, x * factor[:, None])
