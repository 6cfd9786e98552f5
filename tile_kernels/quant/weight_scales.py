"""Scales of weights as block-scaled matrix products take them, by PyTorch operations alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.quant import formats
from tile_kernels.runtime import backends, checks
from tile_kernels.utils import align, ceil_div

__all__ = ["batched_transpose_weight_sf", "blocked_scales"]

_BLOCKS = (32, 128)
_PER_WORD = 4
_TILE = 128  # rows and columns of a weight come in multiples

Pair = tuple[Tensor, Tensor]


def _packed_rows(exponents: Tensor, block_size: int) -> Tensor:
    """uint8 `[g, rows, columns]` of blocks to int32 `[g, rows * b, ceil(columns / 4)]`.

    Four exponents of a row in a word; each row of blocks is repeated. Words of a column are
    neighbours.
    """
    missing = -exponents.shape[-1] % _PER_WORD
    padded = torch.nn.functional.pad(exponents, (0, missing))
    words = formats.bytes_to_words(padded).transpose(-1, -2)
    return words.repeat_interleave(block_size, dim=-1).transpose(-1, -2)


def _check(index: int, sf: Tensor, block_size: int) -> None:
    name = f"sf[{index}]"
    batched = isinstance(sf, Tensor) and sf.dim() == 3
    dims = ("groups", "row_blocks", "column_blocks") if batched else ("row_blocks", "column_blocks")
    checks.tensor(name, sf, dims, torch.float32, contiguous=True)
    for size in sf.shape[-2:]:
        if size * block_size % _TILE:
            raise ValueError(
                f"{name} must be of a weight whose sizes are multiples of {_TILE}, got "
                f"{size} blocks of {block_size}"
            )
    is_seen = not torch.compiler.is_compiling() and not sf.is_meta
    if (
        is_seen
        and (sf.is_cpu or backends.is_checked())
        and (sf.view(torch.int32) & 0x807FFFFF != 0).any()
    ):
        raise ValueError(f"{name} must hold powers of two")


def _check_buffers(index: int, buffers: object, sf: Tensor, block_size: int, flag: bool) -> None:
    """Two tensors with the shapes of the results; their strides are free."""
    name = f"outs[{index}]"
    if not (isinstance(buffers, (tuple, list)) and len(buffers) == 2):
        given = len(buffers) if isinstance(buffers, (tuple, list)) else type(buffers).__name__
        raise TypeError(f"{name} must be two tensors, or None, got {given}")
    *groups, rows, columns = sf.shape
    shapes = (
        (*groups, rows * block_size, ceil_div(columns, _PER_WORD)),
        (*groups, columns * block_size, ceil_div(rows, _PER_WORD)),
    )
    for i, (buffer, shape) in enumerate(zip(buffers, shapes)):
        wanted = (*shape[:-2], shape[-1], shape[-2]) if i == 1 and flag else shape
        dims = ("...",) * len(wanted)
        checks.tensor(f"{name}[{i}]", buffer, dims, torch.int32, shape=wanted)
        if buffer.device != sf.device:
            raise ValueError(f"{name}[{i}] must be on {sf.device} like sf, got {buffer.device}")


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[Pair | None] | None = None,
) -> list[Pair]:
    """The scales of weights for a product with the weight and for one with its transpose.

    Both are packed exponents, as DeepGEMM takes them: byte `i` of `sf0[row, j]` is the exponent of
    block `(row // b, 4 j + i)`, and of `sf1[column, j]` that of block `(4 j + i, column // b)`.
    Bytes of blocks that do not exist are 0. PyTorch operations, several for each weight: no kernel
    of this package, and nothing waits for the GPU.

    Args:
        sf: For each weight its scales, powers of two: `[n / b, k / b]` or `[g, n / b, k / b]`,
            float32, contiguous; `n` and `k` are multiples of 128. On a CPU and in the checked mode
            other numbers raise; elsewhere their mantissa is dropped.
        block_size: `b`, 32 or 128.
        transpose_sf1s: For each weight whether to return `sf1` as `[.., ceil(n / b / 4), k]`,
            contiguous.
        outs: For each weight buffers for both results, which are filled and returned; or None.

    Returns:
        For each weight `(sf0, sf1)`: `[.., n, ceil(k / b / 4)]` with strides `(.., 1, n)`, and
        `[.., k, ceil(n / b / 4)]` with strides `(.., 1, k)`, int32.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape or a value is not one of these, or the lists differ in length.

    Example:
        >>> sf = torch.tensor([[1.0, 2.0, 4.0, 8.0]] * 4)
        >>> ((sf0, sf1),) = batched_transpose_weight_sf([sf], 32, [False])
        >>> hex(sf0[0, 0].item() & 0xFFFFFFFF), hex(sf1[127, 0].item() & 0xFFFFFFFF)
        ('0x8281807f', '0x82828282')
    """
    with checks.named("batched_transpose_weight_sf"):
        checks.one_of("block_size", block_size, _BLOCKS)
        given = [None] * len(sf) if outs is None else list(outs)
        if not len(sf) == len(transpose_sf1s) == len(given):
            raise ValueError(
                f"transpose_sf1s and outs must have an entry for each of {len(sf)} weights, got "
                f"{len(transpose_sf1s)} and {len(given)}"
            )
        for index, (each, flag, buffers) in enumerate(zip(sf, transpose_sf1s, given)):
            _check(index, each, block_size)
            checks.boolean(f"transpose_sf1s[{index}]", flag)
            if buffers is not None:
                _check_buffers(index, buffers, each, block_size, flag)
    results = []
    for each, flag, buffers in zip(sf, transpose_sf1s, given):
        exponents = formats.encode_ue8m0(each)
        sf0 = _packed_rows(exponents, block_size)
        sf1 = _packed_rows(exponents.transpose(-1, -2), block_size)
        pair = sf0, sf1.transpose(-1, -2).contiguous() if flag else sf1
        if buffers is not None:
            pair = buffers[0].copy_(pair[0]), buffers[1].copy_(pair[1])
        results.append(pair)
    return results


def blocked_scales(sf: Tensor) -> Tensor:
    """Scales in the order of cuBLAS's block-scaled products, which `torch._scaled_mm` takes.

    Tiles of 128 rows and 4 columns follow each other along a row; in a tile, row `r` and column `c`
    are at `r % 32 * 16 + r // 32 * 4 + c`. PyTorch operations.

    Args:
        sf: `[rows, columns]`, one byte each: float8_e4m3fn of `per_token_cast` with `use_e4m3_sf`,
            or uint8; any strides.

    Returns:
        `[align(rows, 128) * align(columns, 4)]`, dtype of `sf`, contiguous; padding is 0.

    Raises:
        TypeError: If the elements have more than one byte.
        ValueError: If there are not two dimensions.

    Example:
        >>> sf = torch.arange(128)[:, None].to(torch.uint8)
        >>> blocked_scales(sf)[[0, 4, 16, 20]].tolist()
        [0, 32, 1, 33]
    """
    with checks.named("blocked_scales"):
        checks.tensor("sf", sf, ("rows", "columns"))
        if sf.element_size() != 1:
            raise TypeError(f"sf must have elements of one byte, got {sf.dtype}")
    rows, columns = sf.shape
    bytes_ = sf.contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(
        bytes_, (0, align(columns, 4) - columns, 0, align(rows, 128) - rows)
    )
    tiles = padded.view(ceil_div(rows, 128), 4, 32, ceil_div(columns, 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(sf.dtype)
