"""`cast_back` and `per_token_cast_back`: from quantized data back to bfloat16 or float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.back import reference
from tile_kernels.quant.back.plan import plan
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import (
    Launch,
    Out,
    Size,
    Spec,
    alignment,
    dtype_name,
    row_alignment,
)
from tile_kernels.runtime.launch import Kernel

E5M6 = "e5m6"

_CAST_ROWS_BACK = Kernel("tile_kernels.quant.back.kernel", "cast_rows_back", plan)


class Arguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    fmt: str
    x_block_size: list[int]
    x_special_fmt: str | None
    global_sf: Tensor | None

    def check(self) -> None:
        layout.check_pair(self.x, self.x_sf)
        if self.global_sf is not None:
            layout.check_global_sf(self.global_sf)
        checks.one_of("fmt", self.fmt, tuple(layout.OUT_DTYPES))
        checks.one_of("x_special_fmt", self.x_special_fmt, (None, E5M6))
        special = self.x_special_fmt is not None
        dtypes = torch.uint8 if special else (torch.float8_e4m3fn, torch.int8)
        x = self.x
        checks.tensor("x", x, ("num_tokens", "hidden"), dtypes, unit_inner_stride=True)
        if special and (x.shape[1] % 12 or x.stride(0) % 4 or x.storage_offset() % 4):
            raise ValueError(
                "x must have rows of 12 bytes for 8 values of e5m6, at multiples of 4 bytes, got "
                f"shape {tuple(x.shape)} and strides {tuple(x.stride())}"
            )
        if x.shape[1] == 0:
            raise ValueError("x must have at least one channel, got 0")
        layout.check_block("x_block_size", self.x_block_size)
        layout.check_source_scales(x, self.x_sf, self.x_block_size, e4m3=True)

    def outputs(self) -> Out:
        shape = (self.x.shape[0], layout.values_in(self.x))
        return Out("out", shape, layout.OUT_DTYPES[self.fmt])

    def launches(self, out: Spec) -> Launch | None:
        x: Any = self.x
        if x.numel() == 0:
            return None
        x_sf, block = self.x_sf, tuple(self.x_block_size)
        # Scales of neighbouring channels that are neighbours themselves can be read together.
        together = x_sf.dtype == torch.float32 and x_sf.stride(1) == 1 and block[1] == 1
        problem = (
            layout.SOURCES[x.dtype], layout.SOURCES[out.dtype], Size(lambda a: a.x.shape[0]),
            layout.values_in(x), block, dtype_name(x_sf), self.global_sf is not None,
            row_alignment(x), alignment(out), row_alignment(x_sf) if together else 4,
        )  # fmt: skip
        factor = layout.flat_scalar(self.global_sf)
        return Launch(_CAST_ROWS_BACK, problem, (layout.as_words(x), x_sf, factor, out))


class PerTokenArguments(NamedTuple):
    """`Arguments` in blocks of one row."""

    x: Tensor
    x_sf: Tensor
    fmt: str
    num_per_channels: int
    x_special_fmt: str | None
    global_sf: Tensor | None

    def in_blocks(self) -> Arguments:
        """The same call of `cast_back`."""
        block = [1, self.num_per_channels]
        return Arguments(self.x, self.x_sf, self.fmt, block, self.x_special_fmt, self.global_sf)

    def check(self) -> None:
        layout.check_pair(self.x, self.x_sf)
        checks.integer("num_per_channels", self.num_per_channels, 1)
        self.in_blocks().check()

    def outputs(self) -> Out:
        return self.in_blocks().outputs()

    def launches(self, out: Spec) -> Launch | None:
        return self.in_blocks().launches(out)


def cost(x: QuantTensor, fmt: str, **_: Any) -> Cost:
    values = x[0].shape[0] * layout.values_in(x[0])
    return Cost(bytes=layout.bytes_of(x) + values * layout.OUT_DTYPES[fmt].itemsize)


def _by_fields(function: Any) -> Any:
    """A reference by the fields of a record."""
    return lambda x, x_sf, *rest: function((x, x_sf), *rest[:-1], global_sf=rest[-1])


CAST_BACK = layout.cast_operator(
    reference.cast_back, Arguments, cost, by_fields=_by_fields(reference.cast_back)
)

PER_TOKEN_CAST_BACK = layout.cast_operator(
    reference.per_token_cast_back, PerTokenArguments, cost,
    by_fields=_by_fields(reference.per_token_cast_back),
)  # fmt: skip


@CAST_BACK.public(reference=reference.cast_back)
def cast_back(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
    out: Tensor | None = None,
    *,
    global_sf: Tensor | float | None = None,
) -> Tensor:
    """Converts quantized data and scales back to bfloat16 or float32.

    A value is `code * scale` in float32, rounded once, and then rounded to bfloat16 if that is
    wanted. Not differentiable.

    Args:
        x: `(data, scales)`. The data are `[num_tokens, hidden]` float8_e4m3fn, or `[num_tokens,
            hidden / 2]` int8 that hold two e2m1 each, or, with `x_special_fmt="e5m6"`,
            `[num_tokens, 3 * hidden / 2]` uint8, of any row stride; rows of e5m6 must start at
            multiples of 4 bytes. The scales are `[ceil(num_tokens / rows), channel_blocks]`
            float32 or float8_e4m3fn, with `channel_blocks = ceil(hidden / channels)`, or `[..,
            ceil(channel_blocks / 4)]` int32 that hold four exponents each, of any strides. Blocks
            of one channel may also have those of `per_channel_cast`, packed along tokens.
        fmt: `"bf16"` or `"fp32"`.
        x_block_size: `(rows, channels)` of a scale, any.
        x_special_fmt: `"e5m6"` if the data are e5m6, else None.
        out: A buffer for the result that is filled and returned.
        global_sf: A float32 with one element, or a number, that every scale is multiplied by.

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
    if sf is not None and isinstance(data, Tensor) and data.dim() == 2 and sf.dim() == 2:
        sf = layout.unpacked_along_tokens(data, sf, x_block_size)
    factor = layout.as_scalar(global_sf, data, torch.float32)
    return CAST_BACK(data, sf, fmt, x_block_size, x_special_fmt, factor, out=out)


def cast_back_e5m6(
    x: QuantTensor, fmt: str, x_block_size: tuple[int, int], out: Tensor | None = None
) -> Tensor:
    """Calls `cast_back` with e5m6 data.

    Args:
        x: `(data, scales)` with data `[num_tokens, 3 * hidden / 2]` uint8, as in `cast_back`.
        fmt, x_block_size, out: As in `cast_back`.

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
    *,
    global_sf: Tensor | float | None = None,
) -> Tensor:
    """Computes `cast_back` of data with one scale per `num_per_channels` channels of a row.

    Not differentiable. Errors are those of `cast_back`.

    Args:
        x: `(data, scales)` as in `cast_back`, with blocks of one row.
        num_per_channels: Channels of a scale, any number.
        fmt, x_special_fmt, out, global_sf: As in `cast_back`.

    Returns:
        As `cast_back`: `[num_tokens, hidden]`, bfloat16 or float32, contiguous.

    Example:
        >>> data = torch.tensor([[1.0, -2.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
        >>> per_token_cast_back((data, torch.tensor([[0.5, 2.0]])), "fp32", 2)
        tensor([[ 0.5000, -1.0000,  6.0000,  8.0000]])
    """
    data, sf = layout.pair(x)
    factor = layout.as_scalar(global_sf, data, torch.float32)
    return PER_TOKEN_CAST_BACK(data, sf, fmt, num_per_channels, x_special_fmt, factor, out=out)
