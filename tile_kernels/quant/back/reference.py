"""References of the casts back to floating point."""

from __future__ import annotations

import torch

from tile_kernels.quant import casting, formats, scales
from tile_kernels.quant.casting import as_factor
from tile_kernels.quant.types import QuantTensor


def cast_back(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
    *,
    global_sf: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """`casting.cast_back`, or `cast_back_from_e5m6` if that is the special format.

    >>> x = casting.quantize(torch.ones(1, 8), formats.E5M6, (1, 8))
    >>> cast_back(x, "bf16", (1, 8), "e5m6").tolist()
    [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    if x_special_fmt == formats.E5M6.name:
        return cast_back_e5m6(x, fmt, x_block_size, global_sf=global_sf)
    if x_special_fmt is not None:
        raise ValueError(f"x_special_fmt must be None or 'e5m6', got {x_special_fmt!r}")
    data, sf = x
    shape = (data.shape[0], data.shape[1] * (2 if data.dtype == torch.int8 else 1))
    if scales.is_packed_along_tokens(sf, shape, x_block_size):
        x = data, scales.unpack_along_tokens(sf, scales.num_blocks(shape, x_block_size)[0])
    if x[0].dtype not in (formats.E4M3.dtype, formats.E2M1.dtype):
        raise TypeError(f"data must be float8_e4m3fn, or int8 of e2m1, got {x[0].dtype}")
    return casting.round_to(casting.dequantize(x, x_block_size, as_factor(global_sf)), fmt)


def per_token_cast_back(
    x: QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,
    *,
    global_sf: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """`cast_back` of blocks of `(1, num_per_channels)`.

    >>> x = casting.cast(torch.ones(1, 4), "e4m3", (1, 4))
    >>> per_token_cast_back(x, "fp32", 4).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt, global_sf=global_sf)


def cast_back_e5m6(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    *,
    global_sf: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Casts from e5m6 with scale factors: `code * sf` in float32, rounded once.

    Args:
        x: The data, uint8 `[T, 3 * H / 2]`, and the scales.
        fmt: `"bf16"` or `"fp32"`.
        x_block_size: Rows and channels of a block.
        global_sf: A factor of all scales, or None.

    Returns:
        `[T, H]`, bfloat16 or float32.

    Example:
        >>> x = torch.tensor([[0.5, -1, 0.25, 2, 0, 1.5, -3, 4]])
        >>> quantized = casting.quantize(x, formats.E5M6, (1, 8), casting.ScaleFlags(round_sf=True))
        >>> cast_back_e5m6(quantized, "fp32", (1, 8)).equal(x)
        True
    """
    if x[0].dtype != formats.E5M6.dtype:
        raise TypeError(f"e5m6 data must be uint8, got {x[0].dtype}")
    return casting.round_to(casting.dequantize(x, x_block_size, as_factor(global_sf)), fmt)


cast_back_from_e5m6 = cast_back_e5m6
