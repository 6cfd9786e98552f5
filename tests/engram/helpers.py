"""Inputs that tests of several Engram operators use."""

from __future__ import annotations

import torch
from torch import Tensor

INT32, INT64 = torch.int32, torch.int64
EPS, CLAMP = 1e-20, 1e-6


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=INT32)


def inputs(
    tokens: int, streams: int, hidden: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    shapes = ((tokens, streams, hidden), (tokens, streams, hidden), (tokens, hidden))
    weights = ((streams, hidden), (streams, hidden))
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes + weights)
