"""References of the casts in blocks of several rows and channels."""

from __future__ import annotations

import torch

from tile_kernels.quant import formats
from tile_kernels.quant.casting import cast, quantize, scale_factors, to_float32
from tile_kernels.quant.types import QuantTensor, ScaleFlags

_FORMATS = {fmt.name: fmt for fmt in (formats.E4M3, formats.E2M1)}


def per_block_cast(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    amax_min: float | None = None,
) -> QuantTensor:
    """`cast` in blocks of `block_size`.

    >>> data, sf = per_block_cast(torch.full((3, 64), 448.0), "e4m3", (2, 32))
    >>> sf.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    values = to_float32(x, x_block_size=None)
    return quantize(values, _FORMATS[fmt], block_size, flags, amax_min)


def per_block_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    amax_min: float | None = None,
) -> torch.Tensor:
    """The scale factors of `per_block_cast`.

    >>> per_block_cast_with_sf_only(torch.full((3, 64), 448.0), "e4m3", (2, 64)).tolist()
    [[1.0], [1.0]]
    """
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    return scale_factors(x, fmt, block_size, flags, amax_min)


def per_block_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """The data of `per_block_cast` by given row-major scale factors; `round_sf` has no effect.

    >>> sf = torch.tensor([[2.0]])
    >>> per_block_cast_with_precomputed_sf(torch.ones(2, 2), "e4m3", (2, 2), sf).float().tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    return cast(x, fmt, block_size, sf, None, *flags)
