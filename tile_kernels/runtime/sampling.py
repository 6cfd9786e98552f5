"""Helpers of `cases.py` files: random tensors for samples, edits of arguments, comparisons.

What samples consist of (`Sample`, `Cases`, `Reject`) is in `tile_kernels.runtime.cases`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from tile_kernels.runtime.cases import (
    Arguments,
    Build,
    assert_equal_results,
    changed,
    close_results,
    edited,
    misaligned,
    with_value,
)

__all__ = [
    "BF16",
    "FP32",
    "INF",
    "NAN",
    "SPECIAL",
    "assert_equal_results",
    "builder",
    "changed",
    "close_results",
    "edited",
    "misaligned",
    "normal",
    "picked",
    "random_bits",
    "with_some",
    "with_value",
]

BF16, FP32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
# NaN of both signs, infinities, zeros, the ends of float32's range.
SPECIAL = (NAN, -NAN, INF, -INF, 0.0, -0.0, 3e38, 1e-40)

P = ParamSpec("P")


def builder(make: Callable[Concatenate[torch.device, P], Arguments]) -> Callable[P, Build]:
    """Turns a function of a device and sizes into a function of the sizes, for `Sample`.

    Example:
        >>> @builder
        ... def rows(device: torch.device, num_tokens: int, hidden: int) -> Arguments:
        ...     return {"x": normal(num_tokens, hidden, device=device)}
        >>> rows(3, hidden=8)(torch.device("cpu"))["x"].shape
        torch.Size([3, 8])
    """

    @functools.wraps(make)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Build:
        return lambda device: make(device, *args, **kwargs)

    return bind


def normal(
    *shape: int,
    device: torch.device,
    dtype: torch.dtype = FP32,
    extra: int = 0,
    skip: int = 0,
) -> Tensor:
    """Normal numbers, in rows `extra` elements apart, or starting `skip` elements into a storage.

    At most one of `extra` and `skip` is not 0.
    """
    if extra:
        wide = torch.randn(*shape[:-1], shape[-1] + extra, device=device)
        return wide.to(dtype)[..., : shape[-1]]
    flat = torch.randn(math.prod(shape) + skip, device=device)
    return flat.to(dtype)[skip:].view(shape)


def random_bits(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, skip: int = 0
) -> Tensor:
    """Any bit patterns of `dtype`, NaN payloads included, `skip` elements into a storage."""
    count = (math.prod(shape) + skip) * dtype.itemsize
    data = torch.randint(256, (count,), dtype=torch.uint8, device=device)
    return data.view(dtype)[skip:].view(*shape)


def picked(*shape: int, device: torch.device, values: Sequence[float] = SPECIAL) -> Tensor:
    """float32, each element one of `values`: many elements are equal."""
    choices = torch.tensor(values, device=device)
    return choices[torch.randint(len(choices), shape, device=device)]


def with_some(x: Tensor, values: Sequence[float] = SPECIAL, share: float = 0.1) -> Tensor:
    """float32 numbers of which a `share` is replaced by `values`, at random."""
    others = picked(*x.shape, device=x.device, values=values)
    return torch.where(torch.rand(x.shape, device=x.device) < share, others, x)
