"""What the references of the products share: codes times scales, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

Operand = tuple[Tensor, Tensor]


def scales_as_float(sf: Tensor) -> Tensor:
    """float32 scales, or packed exponents as float32: the byte shifted into the exponent."""
    if sf.dtype != torch.int32:
        return sf
    exponents = sf[..., None] >> torch.arange(0, 32, 8, device=sf.device) & 255
    return (exponents.flatten(-2).int() << 23).view(torch.float32)


def widened(data: Tensor, sf: Tensor, rows: int, channels: int = 128) -> Tensor:
    """Codes times scales that `rows` rows and `channels` channels share."""
    scales = scales_as_float(sf).double()
    scales = scales.repeat_interleave(rows, -2).repeat_interleave(channels, -1)
    return data.double() * scales[..., : data.shape[-2], : data.shape[-1]]


def rows_of_b(
    recipe: tuple[int, ...] | None, recipe_b: tuple[int, ...] | None, default: int
) -> int:
    """The rows of `b` that share a scale."""
    if recipe is not None:
        return recipe[1]
    return default if recipe_b is None else recipe_b[0]
