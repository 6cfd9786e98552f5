"""Quantized tensors as torchao and PyTorch's scaled products take them: OCP's MX formats.

`quant.per_token_cast(x, "e4m3", 32, round_sf=True)` is MXFP8 and the same with `"e2m1"` MXFP4; with
packed scales (`use_packed_ue8m0`) too. What differs is how scales are stored:

    data, sf = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True)
    data, scales = mx.mx_operand(data, sf)           # torch.float8_e8m0fnu, [rows, groups]
    blocked = mx.to_blocked(scales)                  # as SwizzleType.SWIZZLE_32_4_4 wants them
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.utils import ceil_div

__all__ = ["from_blocked", "mx_operand", "mx_scales", "to_blocked"]

_WORD = 4  # exponents in an int32
# A tile of the blocked layout: 128 rows of 4 scales in 512 bytes.
TILE_ROWS, TILE_COLUMNS = 128, 4
_DATA = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def mx_scales(sf: Tensor, num_groups: int | None = None) -> Tensor:
    """Scales as `torch.float8_e8m0fnu`: an exponent in each byte.

    Args:
        sf: `[rows, groups]`, float32: powers of two, as casts with `round_sf=True` return; or
            `[rows, ceil(groups / 4)]`, int32: the packed exponents of `use_packed_ue8m0=True`.
        num_groups: With packed scales: how many groups a row has; None: all that the words hold.

    Returns:
        `[rows, groups]`, float8_e8m0fnu, contiguous. A scale of 0 or below 2^-127 becomes 2^-127.

    Raises:
        TypeError: If the dtype is another one.
        ValueError: If the shape is not that of rows, or `num_groups` does not fit.

    Example:
        >>> mx_scales(torch.tensor([[0.25, 1.0]])).float()
        tensor([[0.2500, 1.0000]])
    """
    with checks.named("mx_scales"):
        checks.tensor("sf", sf, ("rows", "groups"), (torch.float32, torch.int32))
        if sf.dtype == torch.int32:
            most = sf.shape[1] * _WORD
            groups = most if num_groups is None else checks.integer("num_groups", num_groups, 0)
            if ceil_div(groups, _WORD) != sf.shape[1]:
                raise ValueError(f"num_groups must be in {max(0, most - 3)}..{most}, got {groups}")
            rows = torch.empty(sf.shape, dtype=torch.int32, device=sf.device).copy_(sf)
            exponents = rows.view(torch.uint8)[:, :groups].contiguous()
            return exponents.view(torch.float8_e8m0fnu)
        if num_groups is not None and num_groups != sf.shape[1]:
            raise ValueError(f"num_groups must be {sf.shape[1]}, got {num_groups}")
    bits = sf.contiguous().view(torch.int32) >> 23  # of a power of two: its exponent alone
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)


def mx_operand(data: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scales of a cast with groups of 32 channels, in PyTorch's dtypes.

    Args:
        data: `[rows, channels]`, e4m3 or e5m2; or `[rows, channels / 2]`, int8 or uint8: packed
            e2m1.
        sf: The scales of the cast, as of `mx_scales`.

    Returns:
        `(data, scales)`: `data` with the same memory, packed e2m1 as `torch.float4_e2m1fn_x2`;
        `scales` `[rows, channels / 32]`, float8_e8m0fnu.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If there are not 32 channels for a scale.
    """
    with checks.named("mx_operand"):
        checks.tensor("data", data, ("rows", "bytes"), _DATA)
        packed = data.dtype in (torch.int8, torch.uint8)
        channels = data.shape[1] * (2 if packed else 1)
        if channels % 32:
            raise ValueError(f"data must have a multiple of 32 channels, got {channels}")
        scales = mx_scales(sf, channels // 32)
        if scales.shape[0] != data.shape[0]:
            raise ValueError(f"sf must have {data.shape[0]} rows like data, got {scales.shape[0]}")
    return (data.view(torch.float4_e2m1fn_x2) if packed else data), scales


def to_blocked(scales: Tensor) -> Tensor:
    """Scales in the order in which tensor cores of Blackwell read them, as cuBLAS takes them.

    Rows and columns are padded with zero bytes to tiles of 128 x 4, which follow each other row by
    row; in a tile the scale of `(row, column)` is byte `row % 32 * 16 + row // 32 * 4 + column`.

    Args:
        scales: `[rows, columns]`, any dtype of one byte. For grouped products call it for the rows
            of each group.

    Returns:
        `[512 * ceil(rows / 128) * ceil(columns / 4)]`, the same dtype.

    Raises:
        TypeError: If an element is not one byte.
        ValueError: If the shape is not that of rows.

    Example:
        >>> to_blocked(torch.ones(2, 2, dtype=torch.uint8)).nonzero().flatten().tolist()
        [0, 1, 16, 17]
    """
    if scales.element_size() != 1:
        raise TypeError(f"to_blocked: scales must have one byte each, got {scales.dtype}")
    if scales.dim() != 2:
        raise ValueError(f"to_blocked: scales must be [rows, columns], got {list(scales.shape)}")
    rows, columns = (ceil_div(n, t) for n, t in zip(scales.shape, (TILE_ROWS, TILE_COLUMNS)))
    padded = torch.zeros(
        rows * TILE_ROWS, columns * TILE_COLUMNS, dtype=torch.uint8, device=scales.device
    )
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(rows, 4, 32, columns, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def from_blocked(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `to_blocked`.

    Args:
        blocked: What `to_blocked` returned.
        rows: Of the scales before.
        columns: Of the scales before.

    Returns:
        `[rows, columns]`, the same dtype, contiguous.

    Raises:
        ValueError: If the number of bytes is not that of the shape.
    """
    row_tiles, column_tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    expected = row_tiles * column_tiles * TILE_ROWS * TILE_COLUMNS
    if blocked.numel() != expected:
        raise ValueError(f"from_blocked: blocked must have {expected} bytes, got {blocked.numel()}")
    tiles = blocked.view(torch.uint8).view(row_tiles, column_tiles, 32, 4, TILE_COLUMNS)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    return whole[:rows, :columns].contiguous().view(blocked.dtype)
