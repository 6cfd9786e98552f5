"""The fused layout: one row per token and chosen expert, the rows of an expert side by side.

What `expand` and `reduce` share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.runtime import checks

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def dtype_names(*dtypes: torch.dtype) -> str:
    """The names of dtypes for a message, `bfloat16, float32`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def data_and_scales(operator: str, x: Any) -> tuple[Tensor, Tensor]:
    """The two tensors of a quantized argument `x`, or a `TypeError`."""
    if not (isinstance(x, tuple) and len(x) == 2 and all(isinstance(t, Tensor) for t in x)):
        given = [type(part).__name__ for part in x] if isinstance(x, tuple) else type(x).__name__
        message = f"x must be a tuple of two tensors, data and scales, got {given}"
        raise TypeError(f"{operator}: {message}")
    return x


def check_positions(token_topk_to_pos: Tensor, num_positions: int) -> None:
    """Refuses slots that name a position outside the layout, or one that another slot names."""
    checks.in_range("token_topk_to_pos", token_topk_to_pos, -1, num_positions - 1)
    checks.distinct("token_topk_to_pos", token_topk_to_pos)
