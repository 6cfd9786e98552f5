"""Reference of `grad_w_reduce`."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import widened


@torch.no_grad()
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of the two norms' weights to what their buffers hold.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_w_partial` | `[P, hc, H]`, of `engram_gate_bwd` | float32 |
    | `weight_hidden`, `weight_embed` | `[hc, H]` | bfloat16, float32 |
    | `grad_weight_hidden`, `grad_weight_embed` | `[hc, H]`, written | float32 |

    The parts are added in order; the sum times the one weight is the gradient of the other.

    >>> of_hidden, of_embed = torch.tensor([[10.0]]), torch.zeros(1, 1)
    >>> parts = torch.tensor([[[1.0]], [[3.5]]])
    >>> grad_w_reduce(parts, torch.tensor([[2.0]]), torch.tensor([[0.5]]), of_hidden, of_embed)
    >>> of_hidden.item(), of_embed.item()
    (12.25, 9.0)
    """
    total = torch.zeros_like(grad_w_partial[0] if len(grad_w_partial) else grad_weight_hidden)
    for part in grad_w_partial:
        total = total + part
    grad_weight_hidden += total * widened(weight_embed)
    grad_weight_embed += total * widened(weight_hidden)
