"""Reference of the cast without scales."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.quant import formats, stochastic
from tile_kernels.runtime.philox import philox

_NAMES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "e4m3"}


def plain_cast(
    x: Tensor,
    dtype: torch.dtype,
    stochastic_rounding: bool = False,
    *,
    seed: Tensor | int | None = None,
) -> Tensor:
    """`x` in another dtype: to the nearest, saturating in e4m3, or rounded stochastically.

    >>> plain_cast(torch.tensor([1.0, -17.0, 1e9]), torch.float8_e4m3fn).float().tolist()
    [1.0, -16.0, 448.0]
    """
    values = x.float()
    if not stochastic_rounding:
        if dtype == torch.float8_e4m3fn:
            return formats.encode_e4m3(values)
        return x.to(dtype, copy=True)
    name = _NAMES[dtype]
    flat = values.reshape(1, -1)
    if seed is None:
        bits = stochastic.hashed_bits(flat, name)
    else:
        bits = seeded_bits(seed, flat.shape[1], x.device)
    codes = stochastic.rounded_codes(flat, bits, name)
    if dtype == torch.bfloat16:
        result = codes.to(torch.int16).view(torch.bfloat16)
    else:
        result = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    return result.view(x.shape)


def seeded_bits(seed: Tensor | int, count: int, device: torch.device) -> Tensor:
    """16 bits for each of `count` values: of sequence `i // 8`, as in `stochastic.seeded_bits`."""
    per = stochastic.PER_COUNTER
    words = torch.stack(philox(seed, torch.arange(-(-count // per), device=device)), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).view(1, -1)[:, :count].int()
