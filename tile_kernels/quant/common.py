"""Utilities for quantized data."""

from __future__ import annotations

import torch

from tile_kernels.quant import formats

__all__ = ["unpack_from_e2m1fn_x2"]


def unpack_from_e2m1fn_x2(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Unpacks values of e2m1 to a floating-point dtype.

    Args:
        x: `[..., W]`, int8 or uint8: two values per byte, the first in the low half.
        out_dtype: The dtype of the result.

    Returns:
        `[..., 2 * W]`, `out_dtype`.

    Example:
        >>> unpack_from_e2m1fn_x2(torch.tensor([0x21, 0x0F], dtype=torch.int8)).tolist()
        [0.5, 1.0, -6.0, 0.0]
    """
    if x.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"x must be int8 or uint8, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got none")
    return formats.decode_e2m1(x).to(out_dtype)
