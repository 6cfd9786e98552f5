"""Reference of `split_to_bf16`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split_to_bf16(x: Tensor, parts: Sequence[int] = (0, 1, 2)) -> Tensor:
    """Parts of float32 values in bfloat16, side by side.

    >>> split_to_bf16(torch.tensor([[1.001953125 + 2**-20]])).tolist()
    [[1.0, 0.001953125, 9.5367431640625e-07]]
    """
    levels, rest = [], x
    for _ in range(max(parts) + 1):
        part = rest.bfloat16()
        rounded = part.float()
        rest = torch.where(rounded.isfinite(), rest - rounded, 0.0)
        levels.append(part)
    return torch.cat([levels[part] for part in parts], dim=1)
