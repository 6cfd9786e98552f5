"""Reference of `fused_weight`."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.runtime.arithmetic import widened


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The product of the weights of the two norms, `[hc, H]` in float32.

    >>> import torch
    >>> fused_weight(torch.tensor([[1.5]]).bfloat16(), torch.tensor([[-2.25]]).bfloat16())
    tensor([[-3.3750]])
    """
    return widened(weight_hidden) * widened(weight_embed)
