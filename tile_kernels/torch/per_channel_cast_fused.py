"""Oracle of the cast along tokens, fused with the gather of the tokens."""

from __future__ import annotations

import torch

from tile_kernels.torch import formats
from tile_kernels.torch.cast import quantize, to_float32
from tile_kernels.torch.gather import gather_or_zero
from tile_kernels.torch.scales import QuantTensor


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    num_per_tokens: int,
    num_per_channels: int | None,
    round_sf: bool,
    pos_to_token: torch.Tensor | None,
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

    >>> x = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]])
    >>> data, sf = per_channel_cast_fused(x, 2, None, True, torch.tensor([2, -1, 0, 1]))
    >>> (data.float() * sf.repeat_interleave(2, 0)).tolist()
    [[5.0, 6.0], [0.0, 0.0], [1.0, 2.0], [3.0, -4.0]]
    """
    quantised = isinstance(x, tuple)
    x_block_size = (1, num_per_channels) if quantised and num_per_channels is not None else None
    values = to_float32(x, x_block_size)
    if pos_to_token is not None:
        values = gather_or_zero(values, pos_to_token)
    return quantize(values, formats.E4M3, (num_per_tokens, 1), round_sf)
