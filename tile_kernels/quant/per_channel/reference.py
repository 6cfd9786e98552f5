"""References of the casts in blocks of one channel."""

from __future__ import annotations

import torch

from tile_kernels.quant import formats
from tile_kernels.quant.casting import quantize, to_float32
from tile_kernels.quant.gather import gather_or_zero
from tile_kernels.quant.scales import pack_along_tokens
from tile_kernels.quant.swiglu.reference import swiglu_forward
from tile_kernels.quant.types import QuantTensor, ScaleFlags
from tile_kernels.transpose.reference import transpose


def per_channel_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    *,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    amax_min: float | None = None,
) -> QuantTensor:
    """`cast` in blocks of `(num_per_tokens, 1)`; packed scale factors hold four rows of them.

    >>> per_channel_cast(torch.tensor([[448.0, 1.0], [1.0, 896.0]]), "e4m3", 2)[1].tolist()
    [[1.0, 2.0]]
    """
    data, sf = per_channel_cast_fused(
        x, fmt, num_per_tokens, round_sf, num_per_channels, None, amax_min
    )
    return data, pack_along_tokens(sf) if use_packed_ue8m0 else sf


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
    amax_min: float | None = None,
) -> QuantTensor:
    """Gathered rows to e4m3, with a scale factor for every `num_per_tokens` rows of a channel.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[T, H]` | bfloat16, float32 |
    | or `x`, in blocks of `(1, num_per_channels)` | `([T, H], sf)` | e4m3, float32 or int32 |
    | `pos_to_token`, optional | `[T_out]`, below `T`, negative for a row of `+0` | int32, int64 |
    | returns data | `[T_out, H]` | float8_e4m3fn |
    | returns scale factors | `[ceil(T_out / num_per_tokens), H]` | float32 |

    `num_per_channels` is ignored for an `x` without scale factors. Without `pos_to_token` the rows
    stay as they are.

    >>> index = torch.tensor([-1, 0])
    >>> per_channel_cast_fused(torch.tensor([[448.0]]), "e4m3", 2, pos_to_token=index)[0].float()
    tensor([[  0.],
            [448.]])
    """
    if fmt != formats.E4M3.name:
        raise ValueError(f"fmt must be 'e4m3', got {fmt!r}")
    quantized = isinstance(x, tuple)
    x_block_size = (1, num_per_channels) if quantized and num_per_channels is not None else None
    values = to_float32(x, x_block_size)
    if pos_to_token is not None:
        values = gather_or_zero(values, pos_to_token)
    return quantize(values, formats.E4M3, (num_per_tokens, 1), ScaleFlags(round_sf), amax_min)


def per_channel_cast_fused_and_transpose(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
    amax_min: float | None = None,
) -> QuantTensor:
    """`per_channel_cast_fused` with the data, not the scale factors, transposed: `[H, T_out]`.

    >>> index = torch.tensor([-1, 0])
    >>> x = torch.tensor([[448.0]])
    >>> per_channel_cast_fused_and_transpose(x, "e4m3", 2, pos_to_token=index)[0].float()
    tensor([[  0., 448.]])
    """
    data, sf = per_channel_cast_fused(
        x, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token, amax_min
    )
    return transpose(data), sf


def per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    amax_min: float | None = None,
) -> QuantTensor:
    """`per_channel_cast` with the data, not the scale factors, transposed: `[H, T]`.

    >>> data, sf = per_channel_cast_and_transpose(torch.ones(4, 3), "e4m3", 2)
    >>> tuple(data.shape), tuple(sf.shape)
    ((3, 4), (2, 3))
    """
    data, sf = per_channel_cast(x, fmt, num_per_tokens, round_sf, amax_min=amax_min)
    return transpose(data), sf


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    amax_min: float | None = None,
) -> QuantTensor:
    """`swiglu_forward`, rounded to bfloat16, then `per_channel_cast_and_transpose`.

    >>> x = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    >>> data, sf = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 2)
    >>> data.float().tolist(), sf.item() * 448
    ([[448.0, 352.0]], 2.1875)
    """
    act = swiglu_forward(x, swiglu_clamp_value=swiglu_clamp_value).bfloat16()
    if without_transpose:
        return per_channel_cast(act, fmt, num_per_tokens, round_sf, amax_min=amax_min)
    return per_channel_cast_and_transpose(act, fmt, num_per_tokens, round_sf, amax_min)
