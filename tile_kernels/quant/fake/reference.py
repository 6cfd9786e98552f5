"""Reference of `fake_cast`."""

from __future__ import annotations

import torch

from tile_kernels.quant.casting import as_factor, dequantize
from tile_kernels.quant.per_token.reference import per_token_cast


def fake_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    *,
    use_e4m3_sf: bool = False,
    global_sf: torch.Tensor | float | None = None,
    amax_min: float | None = None,
) -> torch.Tensor:
    """What `per_token_cast` and `per_token_cast_back` make of `x`, in its dtype.

    >>> fake_cast(torch.tensor([[1.0, -2.0, 3.3, 7.0]]), "e4m3", 4).tolist()
    [[1.0, -2.0, 3.25, 7.0]]
    """
    quantized = per_token_cast(
        x, fmt, num_per_channels, round_sf=round_sf, use_e4m3_sf=use_e4m3_sf, global_sf=global_sf,
        amax_min=amax_min,
    )  # fmt: skip
    return dequantize(quantized, (1, num_per_channels), as_factor(global_sf)).to(x.dtype)
