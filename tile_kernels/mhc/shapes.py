"""What the operators on streams share: leading dimensions, their checks, rows for a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.runtime.launch import alignment, is_recording

MOST_STREAMS = 8
MOST_TOKENS = 2**30  # blocks and threads are counted in 32 bits

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
    """`value` is a tensor whose last dimensions are `last`, of these `sizes`.

    The leading ones are the tokens; `like` names the argument that has the same, with them. Returns
    what `like` is for other arguments.
    """
    if isinstance(value, Tensor):  # as it should be, in few steps
        before = value.dim() - len(last)
        leading = value.shape[:before]
        if (
            before >= 0
            and value.dtype is dtype
            and value.layout is torch.strided
            and (sizes is None or value.shape[before:] == sizes)
            and (like is None or leading == like[1])
            and _few(value.numel())
            and (not contiguous or value.is_contiguous())
        ):
            return name, leading
    return _tensor_in_words(name, value, last, dtype, like, sizes, contiguous)


def _tensor_in_words(
    name: str,
    value: Tensor,
    last: tuple[str, ...],
    dtype: torch.dtype,
    like: Leading | None,
    sizes: tuple[int, ...] | None,
    contiguous: bool,
) -> Leading:
    """What `tensor` checks, with an error that says what is wrong, or a tensor that is large."""
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
    if isinstance(tokens, int) and tokens > MOST_TOKENS:
        raise ValueError(f"{name} must have at most {MOST_TOKENS} tokens, got {tokens}")
    return name, leading


def _few(count: int) -> bool:
    """Whether a number is small, and known: under `torch.compile` it may be neither."""
    return isinstance(count, int) and count <= MOST_TOKENS


def streams(name: str, value: Tensor, *, contiguous: bool = True) -> tuple[Leading, int, int]:
    """`value` is bfloat16 `[..., m, h]`: its leading dimensions, `m` and `h`."""
    leading = tensor(name, value, STREAMS, torch.bfloat16, contiguous=contiguous)
    m, h = value.shape[-2:]
    stream_count(name, m)
    if h < 1:
        raise ValueError(f"{name} must have at least one column, got 0")
    return leading, m, h


def stream_count(name: str, m: int) -> None:
    """`name` has a number of streams that kernels are made for."""
    if not 1 <= m <= MOST_STREAMS:
        raise ValueError(f"{name} must have 1..{MOST_STREAMS} streams, got {m}")


def rows(value: Tensor, *last: int) -> Tensor:
    """A contiguous tensor as a kernel sees it: its leading dimensions are one."""
    return value.contiguous().view(-1, *last)


def common_alignment(*values: Tensor) -> int:
    """The largest power of two, up to 16 bytes, that divides all the addresses."""
    if is_recording():
        return min(alignment(value) for value in values)
    bits = 16
    for value in values:
        bits |= value.data_ptr()
    return bits & -bits
