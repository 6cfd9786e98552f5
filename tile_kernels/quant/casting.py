"""Casts between floating-point and block-scaled tensors, which the references are made of.

The references accept every size that the formats can hold, more than the operators do. What `cast`
says of NaN and infinity, and `tile_kernels.quant.scales` of padding, holds for all of them.
"""

from __future__ import annotations

from typing import NamedTuple, overload

import torch

from tile_kernels import config
from tile_kernels.quant import formats, scales, stochastic
from tile_kernels.quant.types import ROW_MAJOR, QuantTensor, ScaleFlags
from tile_kernels.runtime.arithmetic import row_chunks


class CastOptions(NamedTuple):
    """Scales in e4m3, with a factor of all; and stochastic rounding, by a seed or by a hash."""

    use_e4m3_sf: bool = False
    global_sf: torch.Tensor | None = None
    stochastic: bool = False
    seed: torch.Tensor | int | None = None


NEAREST = CastOptions()

_CAST_FORMATS = {fmt.name: fmt for fmt in (formats.E4M3, formats.E2M1)}
_FORMAT_OF_DTYPE = {fmt.dtype: fmt for fmt in (formats.E4M3, formats.E2M1, formats.E5M6)}
_OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def as_factor(global_sf: torch.Tensor | float | None) -> torch.Tensor | None:
    """A factor of all scales as a float32 tensor without dimensions, for any device.

    >>> as_factor(0.5), as_factor(None)
    (tensor(0.5000), None)
    """
    if isinstance(global_sf, (int, float)):
        return torch.tensor(global_sf, dtype=torch.float32)
    return global_sf if global_sf is None else global_sf.reshape(())


def dequantize(
    x: QuantTensor, block_size: tuple[int, int], global_sf: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of a quantized tensor, float32 `[T, H]`: `code * sf`, rounded once.

    The format follows from the dtype of the data, and the layout of the scale factors from their
    dtype. With `global_sf` the factor is `sf * global_sf`.

    >>> dequantize((torch.tensor([[33, 15]], dtype=torch.int8), torch.tensor([[2.0, 0.5]])), (1, 2))
    tensor([[ 1.,  2., -3.,  0.]])
    """
    data, sf = x
    if data.dtype not in _FORMAT_OF_DTYPE:
        raise TypeError(f"quantized data must be one of {[*_FORMAT_OF_DTYPE]}, got {data.dtype}")
    values = _FORMAT_OF_DTYPE[data.dtype].decode(data)
    factors = scales.read_sf(sf)
    if global_sf is not None:
        factors = factors * global_sf
    return values * scales.expand_blocks(factors, block_size, values.shape)


def to_float32(x: torch.Tensor | QuantTensor, x_block_size: tuple[int, int] | None) -> torch.Tensor:
    """What a cast reads, as float32 `[T, H]`: a bfloat16 or float32 tensor, or a quantized one.

    >>> to_float32(torch.tensor([[1.5]], dtype=torch.bfloat16), None)
    tensor([[1.5000]])
    """
    if isinstance(x, tuple):
        if x_block_size is None:
            raise ValueError("x_block_size must be given for a quantized x, got None")
        return dequantize(x, x_block_size)
    if x_block_size is not None:
        raise ValueError(f"x_block_size is for a quantized x only, got {x_block_size}")
    if x.dtype not in _OUT_DTYPES.values():
        raise TypeError(f"x must be bfloat16 or float32, got {x.dtype}")
    return x.float()


def block_amax(values: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude in each block of float32 `[T, H]`: float32 `[M, G]`.

    NaN counts as 0, so that it spoils no neighbour, and infinity as the largest finite float32, so
    that scale factors stay finite.

    >>> block_amax(torch.tensor([[1.0, -2.0, float("nan")], [3.0, 0.0, 0.5]]), (2, 2)).tolist()
    [[3.0, 0.5]]
    """
    if not values.is_cpu:  # where looking at the result would wait for it
        return scales.block_max(values.nan_to_num(), block_size)
    largest = scales.block_max(values, block_size)
    if largest.isnan().any():
        largest = scales.block_max(values.nan_to_num(nan=0.0), block_size)
    return largest.nan_to_num()


def quantize(
    values: torch.Tensor,
    fmt: formats.Format,
    block_size: tuple[int, int],
    flags: ScaleFlags = ROW_MAJOR,
    clamp_min: float | None = None,
    options: CastOptions = NEAREST,
) -> QuantTensor:
    """float32 `[T, H]` to data of a format and the scale factors of its blocks.

    `scale_from_amax` defines the scale factors, `encode_scaled` the data.

    >>> data, sf = quantize(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), formats.E4M3, (1, 4))
    >>> data.float().tolist(), sf.tolist()
    ([[64.0, -128.0, 192.0, 448.0]], [[0.015625]])
    """
    sf, inv = _scales_of(values, fmt, block_size, flags, clamp_min, options)
    if options.stochastic:
        scaled = scales.times_blocks(values, inv, block_size)
        return stochastic_encode(scaled, fmt, options.seed), sf
    return encode_scaled(values, fmt, block_size, inv), sf


def _scales_of(
    values: torch.Tensor,
    fmt: formats.Format,
    block_size: tuple[int, int],
    flags: ScaleFlags,
    clamp_min: float | None,
    options: CastOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale factors in their layout, and the factors before encoding `[M, G]`."""
    amax = block_amax(values, block_size)
    if clamp_min is None:
        clamp_min = config.amax_min(fmt.name, options.use_e4m3_sf)
    if options.use_e4m3_sf:
        sf, inv = formats.e4m3_scale_from_amax(amax, fmt, clamp_min, options.global_sf)
        return scales.lay_out_e4m3_sf(sf, flags.use_tma_aligned_col_major_sf), inv
    sf, inv = formats.scale_from_amax(amax, fmt, flags.round_sf, clamp_min)
    return scales.lay_out_sf(sf, *flags[1:]), inv


def stochastic_encode(
    scaled: torch.Tensor, fmt: formats.Format, seed: torch.Tensor | int | None
) -> torch.Tensor:
    """Scaled float32 `[T, H]` to data of e4m3 or e2m1, rounded stochastically.

    >>> x = torch.full((1, 8), 1.25)
    >>> codes = stochastic_encode(x, formats.E2M1, 0).view(torch.uint8)
    >>> set((codes & 15).flatten().tolist()) <= {2, 3}  # 1 or 1.5
    True
    """
    bits = stochastic.bits_of(scaled, fmt.name, seed)
    codes = stochastic.rounded_codes(scaled, bits, fmt.name).to(torch.uint8)
    return codes.view(fmt.dtype) if fmt is formats.E4M3 else formats.pack_e2m1(codes)


def scale_factors(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    flags: ScaleFlags = ROW_MAJOR,
    clamp_min: float | None = None,
    options: CastOptions = NEAREST,
) -> torch.Tensor:
    """The scale factors of `cast` without the data.

    >>> scale_factors(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", (1, 4)).tolist()
    [[0.015625]]
    """
    values = to_float32(x, x_block_size=None)
    return _scales_of(values, _CAST_FORMATS[fmt], block_size, flags, clamp_min, options)[0]


def quantize_with_sf(
    values: torch.Tensor,
    fmt: formats.Format,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    global_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 `[T, H]` to data of a format, by given float32 or e4m3 scale factors `[M, G]`.

    The factor before encoding is `1 / sf`, or `1 / (sf * global_sf)`, rounded once.

    >>> sf = torch.tensor([[2.0]])
    >>> quantize_with_sf(torch.tensor([[1.0, 1000.0]]), formats.E4M3, (1, 2), sf).float().tolist()
    [[0.5, 448.0]]
    """
    expected = scales.num_blocks(values.shape, block_size)
    if sf.shape != expected or sf.dtype not in (torch.float32, torch.float8_e4m3fn):
        raise ValueError(
            f"sf must be float32 or float8_e4m3fn of shape {expected} for x of "
            f"{tuple(values.shape)} in blocks of {block_size}, got {sf.dtype} of {tuple(sf.shape)}"
        )
    factors = sf.float() if global_sf is None else sf.float() * global_sf
    return encode_scaled(values, fmt, block_size, torch.ones_like(factors) / factors)


def encode_scaled(
    values: torch.Tensor, fmt: formats.Format, block_size: tuple[int, int], inv: torch.Tensor
) -> torch.Tensor:
    """float32 `[T, H]` to `encode(value * inv)`, saturating, with a factor for each block.

    Infinity becomes the largest finite value of every format, of its sign; NaN is encoded as NaN.

    >>> encode_scaled(torch.tensor([[2.0, -3.0]]), formats.E2M1, (1, 1), torch.tensor([[2.0, 1.0]]))
    tensor([[-42]], dtype=torch.int8)
    """
    num_rows, width = values.shape
    chunks = row_chunks(num_rows, width, block_size[0]) if values.is_cpu else [slice(num_rows)]
    encoded = []
    for rows in chunks or [slice(0)]:
        factors = inv[rows.start // block_size[0] if rows.start else 0 :]
        scaled = scales.times_blocks(values[rows], factors, block_size)
        encoded.append(fmt.encode(scaled.clamp_(-fmt.max, fmt.max)))
    return torch.cat(encoded)


@overload
def cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    block_size: tuple[int, int] = (32, 32),
    sf: None = None,
    x_block_size: tuple[int, int] | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> QuantTensor: ...
@overload
def cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> torch.Tensor: ...
def cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    block_size: tuple[int, int] = (32, 32),
    sf: torch.Tensor | None = None,
    x_block_size: tuple[int, int] | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> QuantTensor | torch.Tensor:
    """Casts to e4m3 or e2m1 with one scale factor per block, for any block and tensor size.

    A NaN affects only its own element. An infinity counts as the largest finite float32 for the
    scale and saturates. The minimum amax of a block is set in `tile_kernels.config`.

    Args:
        x: `[T, H]`, bfloat16 or float32; or, with `x_block_size`, a pair of codes (`[T, H]` e4m3,
            or `[T, H / 2]` int8 of e2m1) and scales, which is first converted to float32.
        fmt: `"e4m3"` or `"e2m1"`.
        block_size: Rows and channels of a block.
        sf: `[ceil(T / rows), ceil(H / channels)]`, float32: scales to use; or None.
        x_block_size: The block size of a quantized `x`.
        round_sf: Whether scales are rounded up to powers of two.
        use_tma_aligned_col_major_sf: Whether scales are column-major, as in
            `tile_kernels.quant.scales`.
        use_packed_ue8m0: Whether scales are packed exponents, as in `tile_kernels.quant.scales`.
        use_e4m3_sf: Whether scales are e4m3.

    Returns:
        The data, `[T, H]` float8_e4m3fn or `[T, H / 2]` int8, and the scales; with `sf` only the
        data.

    Example:
        >>> data, sf = cast(torch.tensor([[1.0, -2.0, 3.0, 4.0]]), "e2m1", (1, 4), round_sf=True)
        >>> bytes(data.view(torch.uint8)[0].tolist()).hex(), sf.tolist()
        ('c265', [[1.0]])
    """
    target = _CAST_FORMATS[fmt]
    values = to_float32(x, x_block_size)
    if sf is None:
        flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
        return quantize(values, target, block_size, flags, options=CastOptions(use_e4m3_sf))
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        raise ValueError("a given sf must be row-major float32: leave both layout flags False")
    return quantize_with_sf(values, target, block_size, sf)


def cast_back(x: QuantTensor, fmt: str, block_size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    """Casts from e4m3 or e2m1 with scale factors: `code * sf` in float32, rounded once.

    Args:
        x: The data and the scales of `cast`.
        fmt: `"bf16"` or `"fp32"`.
        block_size: Rows and channels of a block.

    Returns:
        `[T, H]`, bfloat16 or float32.

    Example:
        >>> x = cast(torch.tensor([[1.0, -2.0, 3.0, 4.0]]), "e2m1", (1, 4), round_sf=True)
        >>> cast_back(x, "fp32", (1, 4))
        tensor([[ 1., -2.,  3.,  4.]])
    """
    if x[0].dtype not in (formats.E4M3.dtype, formats.E2M1.dtype):
        raise TypeError(f"data must be float8_e4m3fn, or int8 of e2m1, got {x[0].dtype}")
    return round_to(dequantize(x, block_size), fmt)


def round_to(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """float32 to the dtype that "bf16" or "fp32" names.

    >>> round_to(torch.tensor([1.0]), "bf16").dtype
    torch.bfloat16
    """
    if fmt not in _OUT_DTYPES:
        raise ValueError(f"fmt must be one of {[*_OUT_DTYPES]}, got {fmt!r}")
    return values.to(_OUT_DTYPES[fmt])
