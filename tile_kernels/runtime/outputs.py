"""Buffers for results: allocated, or the caller's after a look at them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def output(
    name: str,
    given: Tensor | None,
    like: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """`given` if it has this shape, dtype and these strides (default: contiguous), else an error.

    Without `given`, a new tensor on the device of `like`; `dtype` defaults to that of `like`.
    """
    dtype = dtype or like.dtype
    if given is None:
        if strides is None:
            return like.new_empty(shape, dtype=dtype)
        return like.new_empty_strided(shape, strides, dtype=dtype)
    check_output(name, given, shape, dtype, strides)
    return given


def check_output(
    name: str,
    given: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> None:
    """Refuse a buffer of another dtype, shape or stride; strides of single elements are free."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.dtype is not dtype:
        raise TypeError(f"{name} must be {_words(dtype)}, got {_words(given.dtype)}")
    if tuple(given.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}")
    if strides is None:
        if not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(given.stride())}")
    elif given.numel() and any(
        size > 1 and mine != wanted for size, mine, wanted in zip(shape, given.stride(), strides)
    ):
        raise ValueError(f"{name} must have strides {tuple(strides)}, got {given.stride()}")


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
