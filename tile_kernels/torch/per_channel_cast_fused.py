"""`per_channel_cast_fused` with the arguments and at the import path that it has in TileKernels."""

from __future__ import annotations

import torch

from tile_kernels.quant.per_channel import reference
from tile_kernels.quant.types import QuantTensor

__all__ = ["per_channel_cast_fused"]


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    num_per_tokens: int,
    num_per_channels: int | None,
    round_sf: bool,
    pos_to_token: torch.Tensor | None,
) -> QuantTensor:
    """The operator's reference, which always casts to e4m3, with its arguments in another order.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]])
    >>> data, sf = per_channel_cast_fused(x, 2, None, True, torch.tensor([2, -1, 0, 1]))
    >>> (data.float() * sf.repeat_interleave(2, 0)).tolist()
    [[5.0, 6.0], [0.0, 0.0], [1.0, 2.0], [3.0, -4.0]]
    """
    return reference.per_channel_cast_fused(
        x, "e4m3", num_per_tokens, round_sf, num_per_channels, pos_to_token
    )
