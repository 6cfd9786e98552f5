"""Weights of the chosen experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.weights import NORMALIZE_WEIGHT
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import gradient, op

_KERNEL = Kernel("tile_kernels.moe.kernels.weights", "normalize_weight")


def _check(topk_weights: Tensor) -> None:
    dims = ("num_tokens", "num_topk")
    checks.tensor("topk_weights", topk_weights, dims, torch.float32, contiguous=True)
    if topk_weights.shape[1] < 1:
        raise ValueError("topk_weights must have at least one column, got 0")


def _cost(topk_weights: Tensor) -> Cost:
    return Cost(bytes=8 * topk_weights.numel() + 4 * topk_weights.shape[0])


@op(check=_check, oracle=oracles.normalize_weight, cost=_cost, cases=NORMALIZE_WEIGHT)
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of each token over their sum.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `topk_weights` | `[num_tokens, num_topk]` | float32 | contiguous |
    | returns `denominator` | `[num_tokens]` | float32 | contiguous |
    | returns `normalized` | `[num_tokens, num_topk]` | float32 | contiguous |

    `denominator = 1e-20 + w[0] + w[1] + ...`, added in that order and rounded at each step;
    `normalized = w / denominator`, correctly rounded. A row of zeros stays zeros. Both results are
    differentiable.

    Raises `TypeError` on another dtype, `ValueError` on another rank, a non-contiguous tensor or
    no columns.

    >>> normalize_weight(torch.tensor([[1.0, 2.0, 3.0, 2.0]]))[0].tolist()
    [8.0]
    """
    num_tokens, num_topk = topk_weights.shape
    denominator = topk_weights.new_empty((num_tokens,))
    normalized = torch.empty_like(topk_weights)
    if nonempty(topk_weights):
        problem = (num_topk, alignment(topk_weights))
        _KERNEL.launch(problem, topk_weights, denominator, normalized)
    return denominator, normalized


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*output)


def _backward(ctx: Any, grad_denominator: Tensor, grad_normalized: Tensor) -> Tensor:
    denominator, normalized = ctx.saved_tensors
    shared = (grad_normalized * normalized).sum(1, keepdim=True)
    return (grad_normalized - shared) / denominator[:, None] + grad_denominator[:, None]


gradient(normalize_weight, _backward, setup_context=_save)
