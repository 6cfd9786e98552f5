"""Rows picked by an index that may say "none"."""

from __future__ import annotations

import torch


def gather_or_zero(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`values[index]` along the first dimension, `+0` where the index is negative.

    `values` is `[n, ...]`, `index` an integer tensor `[m]` of values below `n`; returns `[m, ...]`.

    >>> gather_or_zero(torch.tensor([5.0, 6.0]), torch.tensor([1, -1, 0])).tolist()
    [6.0, 0.0, 5.0]
    """
    gathered = values.new_zeros((index.shape[0], *values.shape[1:]))
    exists = index >= 0
    gathered[exists] = values[index[exists].long()]
    return gathered
