"""`cast_back` and `per_token_cast_back`: from quantized data back to bfloat16 or float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.back import reference
from tile_kernels.quant.back.plan import plan
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment, row_alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

E5M6 = "e5m6"

_CAST_ROWS_BACK = Kernel("tile_kernels.quant.back.kernel", "cast_rows_back", plan)


class Arguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    fmt: str
    x_block_size: list[int]
    x_special_fmt: str | None

    def launches(self, out: Spec) -> Launch | None:
        return _launch(self.x, self.x_sf, tuple(self.x_block_size), out)


class PerTokenArguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    fmt: str
    num_per_channels: int
    x_special_fmt: str | None

    def check(self) -> None:
        layout.check_pair(self.x, self.x_sf)
        checks.integer("num_per_channels", self.num_per_channels, 1)
        check(
            Arguments(self.x, self.x_sf, self.fmt, [1, self.num_per_channels], self.x_special_fmt)
        )

    def launches(self, out: Spec) -> Launch | None:
        return _launch(self.x, self.x_sf, (1, self.num_per_channels), out)


def check(a: Arguments) -> None:
    layout.check_pair(a.x, a.x_sf)
    checks.one_of("fmt", a.fmt, tuple(layout.OUT_DTYPES))
    checks.one_of("x_special_fmt", a.x_special_fmt, (None, E5M6))
    special = a.x_special_fmt is not None
    dtypes = torch.uint8 if special else (torch.float8_e4m3fn, torch.int8)
    x = a.x
    checks.tensor("x", x, ("num_tokens", "hidden"), dtypes, unit_inner_stride=True)
    if special and (x.shape[1] % 12 or x.stride(0) % 4 or x.storage_offset() % 4):
        raise ValueError(
            "x must have rows of 12 bytes for 8 values of e5m6, at multiples of 4 bytes, got shape "
            f"{tuple(x.shape)} and strides {tuple(x.stride())}"
        )
    if x.shape[1] == 0:
        raise ValueError("x must have at least one channel, got 0")
    layout.check_block("x_block_size", a.x_block_size)
    layout.check_source_scales(x, a.x_sf, a.x_block_size)


def outputs(a: Arguments | PerTokenArguments) -> Out:
    return Out("out", (a.x.shape[0], layout.values_in(a.x)), layout.OUT_DTYPES[a.fmt])


def _launch(x: Any, x_sf: Any, block: tuple[int, ...], out: Spec) -> Launch | None:
    if x.numel() == 0:
        return None
    packed = x_sf.dtype == torch.int32
    # Scales of neighbouring channels that are neighbours themselves can be read together.
    together = not packed and x_sf.stride(1) == 1 and block[1] == 1
    problem = (
        layout.SOURCES[x.dtype], layout.SOURCES[out.dtype], Size(lambda a: a.x.shape[0]),
        layout.values_in(x), block, packed, row_alignment(x), alignment(out),
        row_alignment(x_sf) if together else 4,
    )  # fmt: skip
    return Launch(_CAST_ROWS_BACK, problem, (layout.as_words(x), x_sf, out))


def _flat(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The reference by the fields of the arguments."""
    return lambda x, x_sf, *rest: reference((x, x_sf), *rest)


def cost(x: QuantTensor, fmt: str, **_: Any) -> Cost:
    data, sf = x
    written = data.shape[0] * layout.values_in(data) * layout.OUT_DTYPES[fmt].itemsize
    return Cost(bytes=data.numel() + 4 * sf.numel() + written)


CAST_BACK = Operator(
    "quant.cast_back",
    Arguments,
    check=check,
    outputs=outputs,
    reference=_flat(reference.cast_back),
    cost=cost,
    dynamic={"x": 1, "x_sf": 1},
    out=("out",),
    instead=layout.CAST_INSTEAD,
)

PER_TOKEN_CAST_BACK = Operator(
    "quant.per_token_cast_back",
    PerTokenArguments,
    outputs=outputs,
    reference=_flat(reference.per_token_cast_back),
    cost=cost,
    dynamic={"x": 1, "x_sf": 1},
    out=("out",),
    instead=layout.CAST_INSTEAD,
)


@CAST_BACK.public(reference=reference.cast_back)
def cast_back(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Quantized data and scales back to bfloat16 or float32.

    A value is `code * scale` in float32, rounded once, and then rounded to bfloat16 if that is
    wanted. Not differentiable.

    Args:
        x: `(data, scales)`. The data are `[num_tokens, hidden]` float8_e4m3fn, or `[num_tokens,
            hidden / 2]` int8 that hold two e2m1 each, or, with `x_special_fmt="e5m6"`,
            `[num_tokens, 3 * hidden / 2]` uint8, of any row stride; rows of e5m6 must start at
            multiples of 4 bytes. The scales are `[ceil(num_tokens / rows), channel_blocks]`
            float32, with `channel_blocks = ceil(hidden / channels)`, or `[..,
            ceil(channel_blocks / 4)]` int32 that hold four exponents each, of any strides.
        fmt: `"bf16"` or `"fp32"`.
        x_block_size: `(rows, channels)` of a scale, any.
        x_special_fmt: `"e5m6"` if the data are e5m6, else None.
        out: A buffer for the result that is filled and returned.

    Returns:
        `[num_tokens, hidden]`, bfloat16 or float32, contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs; `x_sf` names the scales.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> data = torch.tensor([[1.0, -2.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
        >>> cast_back((data, torch.tensor([[0.5, 2.0]])), "fp32", (1, 2))
        tensor([[ 0.5000, -1.0000,  6.0000,  8.0000]])
    """
    data, sf = layout.pair(x)
    return CAST_BACK(data, sf, fmt, x_block_size, x_special_fmt, out=out)


def cast_back_e5m6(
    x: QuantTensor, fmt: str, x_block_size: tuple[int, int], out: Tensor | None = None
) -> Tensor:
    """Calls `cast_back` with e5m6 data.

    Args:
        x: `(data, scales)` with data `[num_tokens, 3 * hidden / 2]` uint8, as in `cast_back`.
        fmt: `"bf16"` or `"fp32"`.
        x_block_size: `(rows, channels)` of a scale, any.
        out: A buffer for the result that is filled and returned.

    Returns:
        `[num_tokens, hidden]`, bfloat16 or float32, contiguous.

    Example:
        >>> data = torch.zeros(1, 12, dtype=torch.uint8)
        >>> cast_back_e5m6((data, torch.ones(1, 1)), "fp32", (1, 8)).tolist()
        [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    """
    return cast_back(x, fmt, x_block_size, E5M6, out)


@PER_TOKEN_CAST_BACK.public(reference=reference.per_token_cast_back)
def per_token_cast_back(
    x: QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`cast_back` of data with a scale for every `num_per_channels` channels of a row.

    Not differentiable.

    Args:
        x: `(data, scales)` as in `cast_back`, with blocks of one row.
        fmt: `"bf16"` or `"fp32"`.
        num_per_channels: Channels of a scale, any number.
        x_special_fmt: `"e5m6"` if the data are e5m6, else None.
        out: A buffer for the result that is filled and returned.

    Returns:
        `[num_tokens, hidden]`, bfloat16 or float32, contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs; `x_sf` names the scales.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> data = torch.tensor([[1.0, -2.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
        >>> per_token_cast_back((data, torch.tensor([[0.5, 2.0]])), "fp32", 2)
        tensor([[ 0.5000, -1.0000,  6.0000,  8.0000]])
    """
    data, sf = layout.pair(x)
    return PER_TOKEN_CAST_BACK(data, sf, fmt, num_per_channels, x_special_fmt, out=out)
