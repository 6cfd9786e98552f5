"""References of the transposes: PyTorch's own."""

from __future__ import annotations

import torch


def transpose(x: torch.Tensor) -> torch.Tensor:
    """`[rows, cols]` to a contiguous `[cols, rows]`."""
    return x.T.clone(memory_format=torch.contiguous_format)


def batched_transpose(x: torch.Tensor) -> torch.Tensor:
    """`[batch, rows, cols]` to a contiguous `[batch, cols, rows]`."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
