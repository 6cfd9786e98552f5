"""Oracles of the casts to and from 12-bit floats."""

from __future__ import annotations

import torch

from tile_kernels.torch import formats
from tile_kernels.torch.cast import dequantize, quantize, round_to, to_float32
from tile_kernels.torch.scales import QuantTensor


def cast_to_e5m6(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """To e5m6 with a scale factor for every `num_per_channels` channels of a row.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[T, H]`, `H` a multiple of 8 | bfloat16, float32 |
    | returns data | `[T, 3 * H / 2]` | uint8 |
    | returns scale factors | see `tile_kernels.torch.scales` | float32, int32 |

    NaN becomes `0x7E0` in its own place; infinity counts as the largest finite float32 for the
    scale and becomes 65024 of its sign. The largest finite float32 comes back as infinity, since
    its scale is rounded up. Scaled magnitudes below `2**-14` are not rounded to nearest:
    `tile_kernels.torch.formats.e5m6_codes` says how.

    >>> x = torch.tensor([[0.5, -1, 0.25, 2, 0, 0.001, -3, 4]])
    >>> data, sf = cast_to_e5m6(x, 8, round_sf=True)
    >>> bytes(data[0].tolist()).hex(), sf.item() == 2.0**-13
    ('68000f6c040040078007f682', True)
    """
    flags = use_tma_aligned_col_major_sf, use_packed_ue8m0
    values = to_float32(x, x_block_size=None)
    return quantize(values, formats.E5M6, (1, num_per_channels), round_sf, *flags)


def cast_back_from_e5m6(x: QuantTensor, fmt: str, x_block_size: tuple[int, int]) -> torch.Tensor:
    """From e5m6 data and scale factors to `[T, H]`, bfloat16 ("bf16") or float32 ("fp32").

    The data is uint8 `[T, 3 * H / 2]`. `code * sf` in float32, rounded once, then to bfloat16 if
    asked.

    >>> x = torch.tensor([[0.5, -1, 0.25, 2, 0, 1.5, -3, 4]])
    >>> cast_back_from_e5m6(cast_to_e5m6(x, 8, round_sf=True), "fp32", (1, 8)).equal(x)
    True
    """
    if x[0].dtype != formats.E5M6.dtype:
        raise TypeError(f"e5m6 data must be uint8, got {x[0].dtype}")
    return round_to(dequantize(x, x_block_size), fmt)
