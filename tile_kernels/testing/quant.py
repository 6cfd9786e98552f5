"""Helpers of tests of quantised tensors."""

from __future__ import annotations

import torch

from tile_kernels.utils import align, ceil_div

__all__ = ["align", "ceil_div", "clear_unused_sf"]


def clear_unused_sf(sf: torch.Tensor, hidden: int, num_per_channels: int) -> torch.Tensor:
    """Zero the padding bytes of packed one-byte scale exponents, so that they compare equal.

    Four exponents are packed into 32 bits. A row of `hidden` channels has
    `c = ceil(hidden / num_per_channels)` of them, padded to `a`, a multiple of 4; what the bytes
    `c..a-1` hold is unspecified.

    Args:
        sf: the packed scale factors, any dtype, a multiple of `a` bytes in all.
        hidden: channels per token.
        num_per_channels: channels that share a scale factor.

    Returns:
        uint8 `[rows, a]`: the bytes of `sf` in logical order, columns `c..a-1` zero. It shares
        memory with `sf`, which is thereby changed in place, where `sf` is contiguous.

    >>> sf = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8)
    >>> clear_unused_sf(sf, hidden=288, num_per_channels=128).tolist()
    [[1, 2, 3, 0], [5, 6, 7, 0]]
    """
    if hidden <= 0 or num_per_channels <= 0:
        raise ValueError(
            f"clear_unused_sf: hidden and num_per_channels must be positive, "
            f"got {hidden} and {num_per_channels}"
        )
    num_used = ceil_div(hidden, num_per_channels)
    num_columns = align(num_used, 4)
    num_bytes = sf.numel() * sf.element_size()
    if num_bytes % num_columns != 0:
        raise ValueError(
            f"clear_unused_sf: sf must hold a multiple of {num_columns} bytes "
            f"({num_used} scale factors per row, padded to 4), got shape {tuple(sf.shape)} "
            f"of {sf.dtype}: {num_bytes} bytes"
        )
    dense = sf.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # single elements may have any stride
    data = flat.view(torch.uint8).view(-1, num_columns)
    data[:, num_used:] = 0
    return data
