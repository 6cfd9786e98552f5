"""Reference of the compression with norm, rotation and cast."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.compress.reference import kv_compress
from tile_kernels.attention.windows_reference import windows_of
from tile_kernels.quant.per_token.reference import per_token_cast


def kv_compress_norm_rope_cast(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kv_compress`, then norm, rotation and cast; see `tile_kernels.attention`.

    >>> x, ones = torch.ones(1, 66), torch.ones(1, 1)
    >>> codes, sf, rotated = kv_compress_norm_rope_cast(
    ...     x, x, x, weight=x[0], cos=ones, sin=0 * ones, eps=0.0
    ... )
    >>> codes[0, 0].item(), sf.item(), rotated.tolist()
    (256.0, 0.00390625, [[1.0, 1.0]])
    """
    window = bias_a.shape[0]
    entries = kv_compress(
        kv_a, z_a, bias_a, kv_b, z_b, bias_b,
        cu_seqlens=cu_seqlens, num_windows=num_windows, out_dtype=torch.float32,
    )  # fmt: skip
    normed = entries * torch.rsqrt(entries.square().mean(1, keepdim=True) + eps) * weight
    plain = entries.shape[1] - 2 * cos.shape[1]
    codes, sf = per_token_cast(normed[:, :plain].contiguous(), "e4m3", 64, round_sf=True)
    windows = windows_of(kv_a.shape[0], window, cu_seqlens, num_windows, kv_a.device)
    position = (windows.place * window).clamp(max=cos.shape[0] - 1)
    left, right = normed[:, plain::2], normed[:, plain + 1 :: 2]
    c, s = cos[position], sin[position]
    rotated = torch.stack((left * c - right * s, left * s + right * c), 2)
    return codes, sf, rotated.flatten(1).bfloat16()
