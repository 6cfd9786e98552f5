"""Reference of the cast from e2m1 to e4m3 in larger blocks."""

from __future__ import annotations

from tile_kernels.quant import formats, scales
from tile_kernels.quant.types import QuantTensor

# An e2m1 value times 2**6 is at most 384, which e4m3 holds.
_LOSSLESS_SHIFT = 6


def per_block_cast_lossless(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,  # noqa: ARG001 - the scale factors are powers of two anyway
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """From e2m1 to e4m3 in larger blocks, without loss.

    | argument | shape | dtype |
    |---|---|---|
    | `x`, in blocks of `x_block_size` | `([T, H / 2], sf)` | int8 of e2m1; float32 or int32 |
    | returns data | `[T, H]` | float8_e4m3fn |
    | returns scale factors, in blocks of `out_block_size` | `tile_kernels.quant.scales` | |

    Scale factors are powers of two; of others only the exponent counts. With the biased exponents
    `e_in` of the scale factors in an output block, that of the block is
    `e_out = max(max(e_in) - 6, 1)`, and an element becomes `e4m3(value * 2**(e_in - e_out))`. That
    is exact if no scale factor in the block is more than `2**11` times another one. Beyond that
    the smaller elements are rounded to nearest. A scale factor of zero makes zeros.

    >>> import torch
    >>> x = torch.tensor([[0x21, 0x43]], dtype=torch.int8), torch.tensor([[1.0, 0.25]])
    >>> data, sf = per_block_cast_lossless(x, "e4m3", (1, 2), (1, 4))
    >>> data.float().tolist(), sf.tolist()
    ([[32.0, 64.0, 24.0, 32.0]], [[0.015625]])
    """
    if fmt != formats.E4M3.name:
        raise ValueError(f"fmt must be 'e4m3', got {fmt!r}")
    ratio = out_block_size[0] // x_block_size[0], out_block_size[1] // x_block_size[1]
    if (ratio[0] * x_block_size[0], ratio[1] * x_block_size[1]) != tuple(out_block_size):
        raise ValueError(
            f"out_block_size must be a multiple of x_block_size, {x_block_size}, in both "
            f"dimensions, got {out_block_size}"
        )
    data, sf = x
    values = formats.decode_e2m1(data)
    rows, groups = scales.num_blocks(values.shape, x_block_size)
    e_in = scales.read_exponents(sf)[:rows, :groups].int()
    e_out = (scales.block_max(e_in, ratio) - _LOSSLESS_SHIFT).clamp(min=1)

    shift = e_in - scales.expand_blocks(e_out, ratio, e_in.shape)
    factor = formats.decode_ue8m0((127 + shift).clamp(min=0)).masked_fill(e_in == 0, 0.0)
    out = formats.encode_e4m3(values * scales.expand_blocks(factor, x_block_size, values.shape))
    flags = use_tma_aligned_col_major_sf, use_packed_ue8m0
    return out, scales.lay_out_sf(formats.decode_ue8m0(e_out), *flags)
