"""Helpers of tests of quantized tensors."""

from __future__ import annotations

import torch

from tile_kernels.quant.formats import unpack_e2m1
from tile_kernels.utils import align, ceil_div

__all__ = [
    "align", "ceil_div", "clear_unused_sf", "clear_unused_sf_col_pack", "quant_level_rank",
]  # fmt: skip


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


def clear_unused_sf_col_pack(
    sf: torch.Tensor, num_tokens: int, num_per_tokens: int
) -> torch.Tensor:
    """Zero the padding bytes of scale exponents that are packed along tokens.

    Args:
        sf: `[rows, hidden]`, int32: byte `i` of a word in row `r` is of block `4 r + i`.
        num_tokens: Rows of the data.
        num_per_tokens: Rows of a block.

    Returns:
        uint8 `[rows, 4 * hidden]`: the bytes of `sf` in logical order. It shares memory with `sf`,
        which is thereby changed in place, where `sf` is contiguous.

    >>> sf = torch.full((1, 2), 0x01020304, dtype=torch.int32)
    >>> clear_unused_sf_col_pack(sf, 256, 128).tolist()
    [[4, 3, 0, 0, 4, 3, 0, 0]]
    """
    num_used = ceil_div(num_tokens, num_per_tokens)
    if sf.dtype != torch.int32 or sf.dim() != 2 or sf.shape[0] != ceil_div(num_used, 4):
        raise ValueError(
            f"clear_unused_sf_col_pack: sf must be int32 with {ceil_div(num_used, 4)} rows of "
            f"words, got {sf.dtype} {tuple(sf.shape)}"
        )
    data = sf.contiguous().view(torch.uint8)
    if num_used % 4:
        data[-1].view(-1, 4)[:, num_used % 4 :] = 0
    return data


def quant_level_rank(xc: torch.Tensor, fmt: str) -> torch.Tensor:
    """The position of every value among the finite ones of its format, which has only one zero.

    The ranks of two roundings of a number, each to one of its neighbours, differ by at most 1.

    Args:
        xc: `[..., hidden]`: float8_e4m3fn, bfloat16, or int8 that holds two e2m1 each.
        fmt: `"e4m3"`, `"bf16"` or `"e2m1"`.

    Returns:
        int32, one dimension: 0 for the least value, such as -448 in e4m3.

    >>> quant_level_rank(torch.tensor([-448.0, 0, 2**-9]).to(torch.float8_e4m3fn), "e4m3").tolist()
    [0, 126, 127]
    """
    if fmt == "e2m1":
        codes, sign_bit, largest = unpack_e2m1(xc), 3, 0x7
    elif fmt == "e4m3":
        codes, sign_bit, largest = xc.view(torch.uint8), 7, 0x7E
    elif fmt == "bf16":
        codes, sign_bit, largest = xc.view(torch.int16).int() & 0xFFFF, 15, 0x7F7F
    else:
        raise ValueError(f"quant_level_rank: fmt must be e4m3, bf16 or e2m1, got {fmt!r}")
    codes = codes.int().flatten()
    magnitude = codes & ((1 << sign_bit) - 1)
    return largest + torch.where(codes >> sign_bit == 1, -magnitude, magnitude)
