"""References of the casts in blocks of one row."""

from __future__ import annotations

import torch

from tile_kernels.quant import formats
from tile_kernels.quant.casting import (
    CastOptions,
    as_factor,
    quantize,
    quantize_with_sf,
    scale_factors,
    to_float32,
)
from tile_kernels.quant.types import QuantTensor, ScaleFlags

_FORMATS = {fmt.name: fmt for fmt in (formats.E4M3, formats.E2M1)}


def per_token_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    global_sf: torch.Tensor | float | None = None,
    amax_min: float | None = None,
    stochastic_cast: bool = False,
    seed: torch.Tensor | int | None = None,
) -> QuantTensor:
    """`cast` or `cast_to_e5m6` in blocks of `(1, num_per_channels)`.

    >>> data, sf = per_token_cast(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 4)
    >>> data.float().tolist(), sf.tolist()
    ([[64.0, -128.0, 192.0, 448.0]], [[0.015625]])
    """
    if fmt == formats.E5M6.name:
        if isinstance(x, tuple) or x_block_size is not None:
            raise ValueError("a quantized x cannot be cast to e5m6")
        return per_token_cast_to_e5m6(
            x, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0,
            amax_min=amax_min,
        )  # fmt: skip
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    options = CastOptions(use_e4m3_sf, as_factor(global_sf), stochastic_cast, seed)
    values = to_float32(x, x_block_size)
    return quantize(values, _FORMATS[fmt], (1, num_per_channels), flags, amax_min, options)


def per_token_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    global_sf: torch.Tensor | float | None = None,
    amax_min: float | None = None,
) -> torch.Tensor:
    """The scale factors of `per_token_cast`.

    >>> per_token_cast_with_sf_only(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 2).shape
    torch.Size([1, 2])
    """
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    if x_block_size is not None:
        raise ValueError(f"x_block_size is for a quantized x only, got {x_block_size}")
    options = CastOptions(use_e4m3_sf, as_factor(global_sf))
    return scale_factors(x, fmt, (1, num_per_channels), flags, amax_min, options)


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,  # noqa: ARG001
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    global_sf: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """The data of `per_token_cast` by given row-major scale factors; `round_sf` has no effect.

    >>> sf = torch.tensor([[0.5]])
    >>> per_token_cast_with_precomputed_sf(torch.tensor([[1.0, 1000.0]]), "e4m3", 2, sf).float()
    tensor([[  2., 448.]])
    """
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        raise ValueError("a given sf must be row-major: leave both layout flags False")
    if use_e4m3_sf != (sf.dtype == torch.float8_e4m3fn):
        raise TypeError(f"sf must be e4m3 with use_e4m3_sf alone, got {sf.dtype}")
    values = to_float32(x, x_block_size)
    block = (1, num_per_channels)
    return quantize_with_sf(values, _FORMATS[fmt], block, sf, as_factor(global_sf))


def per_token_cast_to_e5m6(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Casts to e5m6 with one scale factor per `num_per_channels` channels of a row.

    NaN becomes `0x7E0` in its own place. Infinity counts as the largest finite float32 for the
    scale and becomes 65024 of its sign. The largest finite float32 is cast back to infinity,
    because its scale is rounded up. Scaled magnitudes below `2**-14` are not rounded to nearest:
    `tile_kernels.quant.formats.e5m6_codes` defines the rounding.

    Args:
        x: `[T, H]`, bfloat16 or float32; `H` is a multiple of 8.
        num_per_channels: Channels per scale.
        use_tma_aligned_col_major_sf: Whether scales are column-major, as in
            `tile_kernels.quant.scales`.
        round_sf: Whether scales are rounded up to powers of two.
        use_packed_ue8m0: Whether scales are packed exponents, as in `tile_kernels.quant.scales`.
        amax_min: The least amax of a group, or None.

    Returns:
        The data, uint8 `[T, 3 * H / 2]`, and the scales, float32 or int32.

    Example:
        >>> x = torch.tensor([[0.5, -1, 0.25, 2, 0, 0.001, -3, 4]])
        >>> data, sf = per_token_cast_to_e5m6(x, 8, round_sf=True)
        >>> bytes(data[0].tolist()).hex(), sf.item() == 2.0**-13
        ('68000f6c040040078007f682', True)
    """
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    values = to_float32(x, x_block_size=None)
    return quantize(values, formats.E5M6, (1, num_per_channels), flags, amax_min)


cast_to_e5m6 = per_token_cast_to_e5m6
