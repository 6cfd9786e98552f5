"""Oracles of the quantising operators, with the operators' own signatures.

The modules beside this one define the results; most functions here only name the blocks. They
accept every size that the formats can hold, more than the operators do. What `cast` says of NaN and
infinity, and `tile_kernels.torch.scales` of padding, holds for all of them.
"""

from __future__ import annotations

import torch

from tile_kernels.torch import formats, scales
from tile_kernels.torch.cast import cast, dequantize, quantize, scale_factors
from tile_kernels.torch.cast import cast_back as _cast_back
from tile_kernels.torch.e5m6 import cast_back_from_e5m6, cast_to_e5m6
from tile_kernels.torch.per_channel_cast_fused import (
    per_channel_cast_fused as _per_channel_cast_fused,
)
from tile_kernels.torch.scales import QuantTensor
from tile_kernels.torch.swiglu import swiglu_backward, swiglu_forward
from tile_kernels.transpose.reference import transpose


def fake_cast(
    x: torch.Tensor, fmt: str, num_per_channels: int, round_sf: bool = False
) -> torch.Tensor:
    """What `per_token_cast` and `per_token_cast_back` make of `x`, in its dtype.

    >>> fake_cast(torch.tensor([[1.0, -2.0, 3.3, 7.0]]), "e4m3", 4).tolist()
    [[1.0, -2.0, 3.25, 7.0]]
    """
    quantised = per_token_cast(x, fmt, num_per_channels, round_sf=round_sf)
    return dequantize(quantised, (1, num_per_channels)).to(x.dtype)


# ---- blocks of one row -------------------------------------------------------------------------


def per_token_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`cast` or `cast_to_e5m6` in blocks of `(1, num_per_channels)`.

    >>> data, sf = per_token_cast(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 4)
    >>> data.float().tolist(), sf.tolist()
    ([[64.0, -128.0, 192.0, 448.0]], [[0.015625]])
    """
    if fmt == formats.E5M6.name:
        if isinstance(x, tuple) or x_block_size is not None:
            raise ValueError("a quantised x cannot be cast to e5m6")
        return per_token_cast_to_e5m6(
            x, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
        )
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    return cast(x, fmt, (1, num_per_channels), None, x_block_size, *flags)


def per_token_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """The scale factors of `per_token_cast`.

    >>> per_token_cast_with_sf_only(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 2).shape
    torch.Size([1, 2])
    """
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    if x_block_size is not None:
        raise ValueError(f"x_block_size is for a quantised x only, got {x_block_size}")
    return scale_factors(x, fmt, (1, num_per_channels), *flags)


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """The data of `per_token_cast` by given row-major scale factors; `round_sf` has no effect.

    >>> sf = torch.tensor([[0.5]])
    >>> per_token_cast_with_precomputed_sf(torch.tensor([[1.0, 1000.0]]), "e4m3", 2, sf).float()
    tensor([[  2., 448.]])
    """
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    return cast(x, fmt, (1, num_per_channels), sf, x_block_size, *flags)


def per_token_cast_to_e5m6(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`cast_to_e5m6`.

    >>> per_token_cast_to_e5m6(torch.ones(2, 16), 16)[0].shape
    torch.Size([2, 24])
    """
    return cast_to_e5m6(
        x, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    )


# ---- blocks of several rows and channels -------------------------------------------------------


def per_block_cast(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`cast` in blocks of `block_size`.

    >>> data, sf = per_block_cast(torch.full((3, 64), 448.0), "e4m3", (2, 32))
    >>> sf.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    return cast(x, fmt, block_size, None, None, *flags)


def per_block_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """The scale factors of `per_block_cast`.

    >>> per_block_cast_with_sf_only(torch.full((3, 64), 448.0), "e4m3", (2, 64)).tolist()
    [[1.0], [1.0]]
    """
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    return scale_factors(x, fmt, block_size, *flags)


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
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    return cast(x, fmt, block_size, sf, None, *flags)


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
    | returns scale factors, in blocks of `out_block_size` | `tile_kernels.torch.scales` | |

    Scale factors are powers of two; of others only the exponent counts. With the biased exponents
    `e_in` of the scale factors in an output block, that of the block is
    `e_out = max(max(e_in) - 6, 1)`, and an element becomes `e4m3(value * 2**(e_in - e_out))`. That
    is exact if no scale factor in the block is more than `2**11` times another one. Beyond that
    the smaller elements are rounded to nearest. A scale factor of zero makes zeros.

    >>> x = torch.tensor([[0x21, 0x43]], dtype=torch.int8), torch.tensor([[1.0, 0.25]])
    >>> data, sf = per_block_cast_lossless(x, "e4m3", (1, 2), (1, 4))
    >>> data.float().tolist(), sf.tolist()
    ([[32.0, 64.0, 24.0, 32.0]], [[0.015625]])
    """
    if fmt != formats.E4M3.name:
        raise ValueError(f"fmt must be 'e4m3', got {fmt!r}")
    ratio = out_block_size[0] // x_block_size[0], out_block_size[1] // x_block_size[1]
    if (ratio[0] * x_block_size[0], ratio[1] * x_block_size[1]) != out_block_size:
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


# ---- blocks of one channel ---------------------------------------------------------------------


def per_channel_cast(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> QuantTensor:
    """`cast` in blocks of `(num_per_tokens, 1)`.

    >>> per_channel_cast(torch.tensor([[448.0, 1.0], [1.0, 896.0]]), "e4m3", 2)[1].tolist()
    [[1.0, 2.0]]
    """
    return cast(x, fmt, (num_per_tokens, 1), round_sf=round_sf)


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
) -> QuantTensor:
    """`tile_kernels.torch.per_channel_cast_fused`.

    >>> index = torch.tensor([-1, 0])
    >>> per_channel_cast_fused(torch.tensor([[448.0]]), "e4m3", 2, pos_to_token=index)[0].float()
    tensor([[  0.],
            [448.]])
    """
    if fmt != formats.E4M3.name:
        raise ValueError(f"fmt must be 'e4m3', got {fmt!r}")
    return _per_channel_cast_fused(x, num_per_tokens, num_per_channels, round_sf, pos_to_token)


def per_channel_cast_and_transpose(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> QuantTensor:
    """`per_channel_cast` with the data, not the scale factors, transposed: `[H, T]`.

    >>> data, sf = per_channel_cast_and_transpose(torch.ones(4, 3), "e4m3", 2)
    >>> tuple(data.shape), tuple(sf.shape)
    ((3, 4), (2, 3))
    """
    data, sf = per_channel_cast(x, fmt, num_per_tokens, round_sf)
    return transpose(data), sf


# ---- back --------------------------------------------------------------------------------------


def cast_back(
    x: QuantTensor, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None = None
) -> torch.Tensor:
    """`tile_kernels.torch.cast_back`, or `cast_back_from_e5m6` if that is the special format.

    >>> cast_back(per_token_cast(torch.ones(1, 8), "e5m6", 8), "bf16", (1, 8), "e5m6").tolist()
    [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    if x_special_fmt == formats.E5M6.name:
        return cast_back_e5m6(x, fmt, x_block_size)
    if x_special_fmt is not None:
        raise ValueError(f"x_special_fmt must be None or 'e5m6', got {x_special_fmt!r}")
    return _cast_back(x, fmt, x_block_size)


def per_token_cast_back(
    x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> torch.Tensor:
    """`cast_back` of blocks of `(1, num_per_channels)`.

    >>> per_token_cast_back(per_token_cast(torch.ones(1, 4), "e4m3", 4), "fp32", 4).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt)


def cast_back_e5m6(x: QuantTensor, fmt: str, x_block_size: tuple[int, int]) -> torch.Tensor:
    """`cast_back_from_e5m6`.

    >>> cast_back_e5m6(per_token_cast(torch.ones(1, 8), "e5m6", 8), "fp32", (1, 8)).shape
    torch.Size([1, 8])
    """
    return cast_back_from_e5m6(x, fmt, x_block_size)


def unpack_from_e2m1fn_x2(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed e2m1, int8 or uint8 `[..., W]`, to `[..., 2 * W]` of a floating-point dtype.

    >>> unpack_from_e2m1fn_x2(torch.tensor([0x21, 0x0F], dtype=torch.int8)).tolist()
    [0.5, 1.0, -6.0, 0.0]
    """
    if x.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"x must be int8 or uint8, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got none")
    return formats.decode_e2m1(x).to(out_dtype)


# ---- fused with SwiGLU -------------------------------------------------------------------------


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> QuantTensor:
    """`swiglu_forward`, and its float32 result to e4m3 in blocks of `(1, num_per_channels)`.

    Rows whose `pos_to_expert` is negative are padding: they are not read and not counted, and
    their data and scale factors are zero. `sf_clamp_min` replaces `1e-4`, the least magnitude that
    a block's scale factor is made from.

    >>> x = torch.tensor([[1.0, -2.0, 12.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    >>> expert = torch.tensor([3, -1])
    >>> data, sf = swiglu_forward_and_per_token_cast(
    ...     x, "e4m3", 2, pos_to_expert=expert, round_sf=True
    ... )
    >>> data.float().tolist(), sf.tolist()
    ([[288.0, -22.0], [0.0, 0.0]], [[0.03125], [0.0]])
    """
    if fmt != formats.E4M3.name:
        raise ValueError(f"fmt must be 'e4m3', got {fmt!r}")
    rest = topk_weights, swiglu_clamp_value, clamped_count
    flags = round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0
    block = 1, num_per_channels
    if pos_to_expert is None:
        out = swiglu_forward(x, pos_to_token_topk, *rest)
        return quantize(out, formats.E4M3, block, *flags, clamp_min=sf_clamp_min)
    real = pos_to_expert >= 0
    index = None if pos_to_token_topk is None else pos_to_token_topk[real]
    out = x.new_zeros((x.shape[0], x.shape[1] // 2), dtype=torch.float32)
    out[real] = swiglu_forward(x[real], index, *rest)
    data, sf = quantize(out, formats.E4M3, block, *flags, clamp_min=sf_clamp_min)
    return data, sf.masked_fill_(~real[:, None], 0)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> QuantTensor:
    """`swiglu_forward`, rounded to bfloat16, then `per_channel_cast_and_transpose`.

    >>> x = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    >>> data, sf = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 2)
    >>> data.float().tolist(), sf.item() * 448
    ([[448.0, 352.0]], 2.1875)
    """
    act = swiglu_forward(x, swiglu_clamp_value=swiglu_clamp_value).bfloat16()
    if without_transpose:
        return per_channel_cast(act, fmt, num_per_tokens, round_sf)
    return per_channel_cast_and_transpose(act, fmt, num_per_tokens, round_sf)


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[torch.Tensor, QuantTensor, torch.Tensor, torch.Tensor]:
    """`swiglu_backward`, and its `x_grad` also to e4m3 in blocks of `(1, num_per_channels)`.

    Returns `(out, (x_grad_e4m3, x_grad_sf), x_grad, weight_grad)`, where `out` and `x_grad` are
    rounded to bfloat16; the e4m3 gradient is made from the float32 one.

    >>> x = torch.tensor([[1.0, 3.0]]).to(torch.float8_e4m3fn), torch.ones(1, 2)
    >>> index, inverse = torch.tensor([0]), torch.tensor([[0]])
    >>> weight = torch.tensor([[2.0]])
    >>> out, (data, sf), x_grad, weight_grad = swiglu_backward_and_per_token_cast(
    ...     x, torch.ones(1, 1), weight, index, inverse, 1, round_sf=True
    ... )
    >>> out.tolist(), (data.float() * sf).tolist(), x_grad.tolist()
    ([[4.375]], [[5.5, 1.5]], [[5.5625, 1.4609375]])
    """
    maps = pos_to_token_topk, token_topk_to_pos
    out, x_grad, weight_grad = swiglu_backward(
        x, grad_out, weight, *maps, num_per_channels, swiglu_clamp_value
    )
    x_grad_quantised = quantize(x_grad, formats.E4M3, (1, num_per_channels), round_sf)
    return out.bfloat16(), x_grad_quantised, x_grad.bfloat16(), weight_grad
