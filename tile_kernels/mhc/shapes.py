"""What the operators on streams share: checks of tokens, streams and parameters, rows for kernels.

The leading dimensions of a tensor are the tokens; all tensors of a call have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import ALIGNMENT, Spec

MAX_STREAMS = 8
MAX_TOKENS = 2**30  # blocks and threads are counted in 32 bits

STREAMS = ("mhc_mult", "hidden")

Leading = tuple[str, Sequence[int]]


def tensor(
    name: str,
    value: Tensor,
    last: tuple[str, ...],
    dtype: torch.dtype,
    *,
    like: Leading | None = None,
    sizes: tuple[int, ...] | None = None,
    contiguous: bool = True,
) -> Leading:
    """Checks that `value` is a tensor whose last dimensions are `last`, of these `sizes`.

    `like` is the name of an argument and the leading dimensions that `value` must share with it.
    Returns what `like` is for other arguments.
    """
    if isinstance(value, Tensor):  # a correct tensor passes in few steps
        before = value.dim() - len(last)
        leading = value.shape[:before]
        if (
            before >= 0
            and value.dtype is dtype
            and value.layout is torch.strided
            and (sizes is None or value.shape[before:] == sizes)
            and (like is None or leading == like[1])
            and _is_small(value.numel())
            and (not contiguous or value.is_contiguous())
        ):
            return name, leading
    return _tensor_or_error(name, value, last, dtype, like, sizes, contiguous)


def _tensor_or_error(
    name: str,
    value: Tensor,
    last: tuple[str, ...],
    dtype: torch.dtype,
    like: Leading | None,
    sizes: tuple[int, ...] | None,
    contiguous: bool,
) -> Leading:
    """The checks of `tensor` one by one, with error messages; large tensors come here too."""
    before = value.dim() - len(last) if isinstance(value, Tensor) else 0
    if before < 0:
        wanted = ", ".join(("...", *last))
        raise ValueError(
            f"{name} must have at least {len(last)} dimensions [{wanted}], got shape "
            f"{tuple(value.shape)}"
        )
    dims = ("...",) * before + last
    shape = (None,) * before + (sizes or (None,) * len(last))
    checks.tensor(name, value, dims, dtype, shape=shape, contiguous=contiguous)
    leading = value.shape[:before]
    if like is not None and leading != like[1]:
        raise ValueError(
            f"{name} must have the leading dimensions of {like[0]}, {tuple(like[1])}, got shape "
            f"{tuple(value.shape)}"
        )
    tokens = math.prod(leading)
    if isinstance(tokens, int) and tokens > MAX_TOKENS:
        raise ValueError(f"{name} must have at most {MAX_TOKENS} tokens, got {tokens}")
    return name, leading


def _is_small(count: int) -> bool:
    """Whether a number is known to be small; under `torch.compile` it may be symbolic."""
    return isinstance(count, int) and count <= MAX_TOKENS


def streams(name: str, value: Tensor, *, contiguous: bool = True) -> tuple[Leading, int, int]:
    """Checks that `value` is bfloat16 `[..., m, h]`; returns its leading dimensions, `m`, `h`."""
    leading = tensor(name, value, STREAMS, torch.bfloat16, contiguous=contiguous)
    m, h = value.shape[-2:]
    stream_count(name, m)
    if h < 1:
        raise ValueError(f"{name} must have at least one column, got 0")
    return leading, m, h


def stream_count(name: str, m: int) -> None:
    """Checks a number of streams."""
    if not 1 <= m <= MAX_STREAMS:
        raise ValueError(f"{name} must have 1..{MAX_STREAMS} streams, got {m}")


def parameter(name: str, value: Tensor, size: int) -> None:
    """Checks that `value` is a vector of `size` learnt numbers."""
    checks.tensor(name, value, ("size",), torch.float32, shape=(size,), contiguous=True)


def count_tokens(a: Any) -> int:
    """The tokens of a record whose `residual` is `[..., m, h]`."""
    return math.prod(a.residual.shape[:-2])


def aligned(x: Spec) -> Spec:
    """`x` at a multiple of 16 bytes, as bulk copies need it, copied if need be."""
    return x if x.alignment == ALIGNMENT else x.clone()


def rows(value: Any, *last: int) -> Spec:
    """A tensor as a kernel takes it: contiguous, with the leading dimensions as one.

    `last` are its other dimensions, or fewer of the same size, but none that it does not have: one
    leading dimension needs no view.
    """
    packed = value.contiguous()
    if packed.dim() == 1 + len(last) and tuple(packed.shape[1:]) == last:
        return packed
    return packed.view(-1, *last)
