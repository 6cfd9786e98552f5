"""Casts with scales along rows (tokens): data and scales, either alone, and e5m6."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.per_token import reference
from tile_kernels.quant.per_token.plan import is_whole, plan
from tile_kernels.quant.storage import CAST, GIVEN, GROUPS, ROW, SCALES
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, row_alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.utils import ceil_div

_CAST_GROUPS = Kernel("tile_kernels.quant.per_token.kernel", "cast_groups", plan)
_CAST_WHOLE_ROWS = Kernel("tile_kernels.quant.per_token.kernel", "cast_whole_rows", plan)

_SF_FORMATS = ("e4m3", "e2m1")  # of scales alone, and of data by given scales


def _check_group(num_per_channels: int, width: int, *, whole: bool = True) -> None:
    checks.integer("num_per_channels", num_per_channels, 1)
    if num_per_channels in GROUPS or (whole and num_per_channels == width):
        return
    allowed = ", ".join(map(str, GROUPS)) + (f" or the row width {width}" if whole else "")
    raise ValueError(f"num_per_channels must be {allowed}, got {num_per_channels}")


def _check_rows(width: int, fmt: str, num_per_channels: int) -> None:
    layout.check_width(fmt, width)
    _check_group(num_per_channels, width)
    if fmt == "e5m6" and num_per_channels != width:
        raise ValueError(
            f"num_per_channels must be the row width {width} for e5m6, got {num_per_channels}"
        )


def check_plain_cast(x: Tensor, fmt: str, num_per_channels: int) -> None:
    """`x` is plain, and the format can hold its rows with such groups."""
    checks.one_of("fmt", fmt, tuple(layout.FORMATS))
    layout.check_plain(x)
    _check_rows(x.shape[1], fmt, num_per_channels)


def launch_cast(
    x: Any,
    x_sf: Any,
    fmt: str,
    group: int,
    block: tuple[int, ...],
    scale_layout: str,
    round_sf: bool,
    task: str,
    out: Spec | None,
    scales: Any,
) -> Launch:
    """The launch for a task: `cast`, `scales` alone, data by `given` scales, or `fake`."""
    width = layout.values_in(x)
    problem = (
        layout.SOURCES[x.dtype], fmt, width, group, scale_layout, round_sf, task, block,
        x_sf is not None and x_sf.dtype == torch.int32, row_alignment(x),
        16 if out is None else row_alignment(out),
    )  # fmt: skip
    kernel = _CAST_WHOLE_ROWS if is_whole(fmt, width, group) else _CAST_GROUPS
    words = None if out is None else layout.as_words(out)
    clamp_min = layout.FORMATS[fmt].clamp_min
    return Launch(kernel, problem, (layout.as_words(x), x_sf, words, scales, clamp_min))


# ---- data and scales ----------------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    x_sf: Tensor | None
    fmt: str
    num_per_channels: int
    x_block_size: list[int] | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool

    def check(self) -> None:
        layout.check_plain_or_pair(self.x)
        if self.x_block_size is not None:
            layout.check_block("x_block_size", self.x_block_size)
        layout.check_flags(self.use_tma_aligned_col_major_sf, self.round_sf, self.use_packed_ue8m0)
        if self.x_sf is None:
            check_plain_cast(self.x, self.fmt, self.num_per_channels)
            if self.x_block_size is not None:
                raise ValueError("x_block_size is for a quantised x, a tuple of data and scales")
            return
        checks.one_of("fmt", self.fmt, tuple(layout.FORMATS))
        dims = ("num_tokens", "hidden")
        checks.tensor("x", self.x, dims, (torch.float8_e4m3fn, torch.int8), unit_inner_stride=True)
        if self.fmt == "e5m6":
            raise ValueError("x must be a plain tensor for e5m6, got quantised data")
        if self.x_block_size is None:
            raise ValueError("x_block_size must say the scale blocks of a quantised x, got None")
        layout.check_source_scales(self.x, self.x_sf, self.x_block_size)
        _check_rows(layout.values_in(self.x), self.fmt, self.num_per_channels)

    def outputs(self) -> tuple[Out, Out]:
        rows, width = self.x.shape[0], layout.values_in(self.x)
        groups = ceil_div(width, self.num_per_channels)
        scale_layout = layout.layout_of(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        return (
            layout.data_out(self.fmt, rows, width),
            layout.scale_out("out_sf", rows, groups, scale_layout),
        )

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        scale_layout = layout.layout_of(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        return launch_cast(
            self.x, self.x_sf, self.fmt, self.num_per_channels, tuple(self.x_block_size or (0, 0)),
            scale_layout, self.round_sf, CAST, out, out_sf,
        )  # fmt: skip


def _reference(x: Tensor, x_sf: Tensor | None, *rest: Any) -> QuantTensor:
    return reference.per_token_cast(x if x_sf is None else (x, x_sf), *rest)


def cost(
    x: Tensor | QuantTensor, fmt: str, num_per_channels: int, use_packed_ue8m0: bool, **_: Any
) -> Cost:
    data, sf = layout.pair(x)
    rows, width = data.shape[0], layout.values_in(data)
    read = data.numel() * data.element_size() + (0 if sf is None else 4 * sf.numel())
    written = layout.scale_bytes(rows, ceil_div(width, num_per_channels), use_packed_ue8m0)
    return Cost(bytes=read + written + rows * layout.data_width(fmt, width))


PER_TOKEN_CAST = Operator(
    "quant.per_token_cast",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic={"x": 1, "x_sf": 1},
    out=("out", "out_sf"),
    instead=layout.CAST_INSTEAD,
)


@PER_TOKEN_CAST.public(reference=reference.per_token_cast)
def per_token_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantizes rows, with a scale for every group of channels or for a whole row.

    A value is `code * scale`, and its code is `encode(value * inv)`. With `a` the largest magnitude
    of a group, but at least 1e-4 (for e2m1 6 * 2**-126), `scale = a / max` and `inv = max / a`.
    The last group of a row may be short. A quantized `x` is multiplied by its scales first.

    Codes are the nearest, ties to even. e5m6 makes an exception of scaled magnitudes below
    `2**-14`: these are truncated to a multiple of `2**-20`, plus a carry that the low 17 bits of
    the float32 decide, so that even the smallest can become `2**-20`. In e5m6, and with `round_sf`
    in every format, the largest finite float32 comes back as infinity.

    A NaN gets the NaN of the format (e2m1: 6) and does not count for the scale. An infinity counts
    as the largest float32 and saturates. Not differentiable: see `fake_cast`.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride. Or a quantized tensor
            `(data, scales)`, with data in float8_e4m3fn, or int8 that holds two e2m1 each, and with
            scales in any layout.
        fmt: `"e4m3"`, `"e2m1"` or `"e5m6"`, which has one scale per row.
        num_per_channels: Channels of a scale: 16, 32, 64, 128, or `hidden`.
        x_block_size: Rows and channels of a scale of a quantized `x`; None for a plain one.
        use_tma_aligned_col_major_sf: Gives scales the strides `(1, n)`, with `n` the tokens rounded
            up to a multiple of 4, instead of contiguous ones. Padding is zero.
        round_sf: Takes the next power of two as scale.
        use_packed_ue8m0: Packs the exponents of four groups into an int32; needs the two flags
            before. The bytes of groups that do not exist are zero.
        out: Buffers `(data, scales)` that are filled and returned.

    Returns:
        `(data, scales)`. The data are `[num_tokens, hidden]` float8_e4m3fn, `[num_tokens,
        hidden / 2]` int8 (e2m1), or `[num_tokens, 3 * hidden / 2]` uint8 (e5m6), contiguous. The
        scales are `[num_tokens, groups]` float32, or `[num_tokens, ceil(groups / 4)]` int32 if
        packed.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> data, scales = per_token_cast(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 4)
        >>> data.float().tolist(), scales.tolist()
        ([[64.0, -128.0, 192.0, 448.0]], [[0.015625]])
    """
    data, sf = layout.pair(x)
    return PER_TOKEN_CAST(
        data, sf, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, out=out,
    )  # fmt: skip


def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Calls `per_token_cast(x, "e5m6", ...)`.

    Magnitudes below `2**-14` are not rounded to nearest, as described there.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        num_per_channels: The row width `hidden`.
        use_tma_aligned_col_major_sf: As in `per_token_cast`.
        round_sf: As in `per_token_cast`.
        use_packed_ue8m0: As in `per_token_cast`.
        out: Buffers `(data, scales)` that are filled and returned.

    Returns:
        `(data, scales)` as `per_token_cast` returns them.

    Example:
        >>> per_token_cast_to_e5m6(torch.ones(1, 8), 8)[0].shape
        torch.Size([1, 12])
    """
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, "e5m6", num_per_channels, None, *flags, out)


# ---- scales alone -------------------------------------------------------------------------------


class ScalesArguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    x_block_size: list[int] | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool

    def check(self) -> None:
        layout.check_flags(self.use_tma_aligned_col_major_sf, self.round_sf, self.use_packed_ue8m0)
        _check_plain_groups(self.x, self.fmt, self.num_per_channels, self.x_block_size)

    def outputs(self) -> Out:
        scale_layout = layout.layout_of(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        groups = ceil_div(self.x.shape[1], self.num_per_channels)
        return layout.scale_out("out", self.x.shape[0], groups, scale_layout)

    def launches(self, out: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        scale_layout = layout.layout_of(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        return launch_cast(
            self.x,
            None,
            self.fmt,
            self.num_per_channels,
            (0, 0),
            scale_layout,
            self.round_sf,
            SCALES,
            None,
            out,
        )


def _check_plain_groups(
    x: Tensor, fmt: str, num_per_channels: int, x_block_size: list[int] | None
) -> None:
    checks.one_of("fmt", fmt, _SF_FORMATS)
    layout.check_plain(x)
    if x_block_size is not None:
        given = checks.shown(x_block_size)
        raise ValueError(f"x_block_size must be None, as x is plain, got {given}")
    layout.check_width(fmt, x.shape[1])
    _check_group(num_per_channels, x.shape[1], whole=False)


def scales_cost(x: Tensor, num_per_channels: int, use_packed_ue8m0: bool, **_: Any) -> Cost:
    groups = ceil_div(x.shape[1], num_per_channels)
    written = layout.scale_bytes(x.shape[0], groups, use_packed_ue8m0)
    return Cost(bytes=x.numel() * x.element_size() + written)


PER_TOKEN_CAST_WITH_SF_ONLY = Operator(
    "quant.per_token_cast_with_sf_only",
    ScalesArguments,
    reference=reference.per_token_cast_with_sf_only,
    cost=scales_cost,
    dynamic={"x": 1},
    out=("out",),
    instead=layout.CAST_INSTEAD,
)


@PER_TOKEN_CAST_WITH_SF_ONLY.public()
def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: list[int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The scales of `per_token_cast` without the data.

    Only the scales are allocated. Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        num_per_channels: Channels of a scale: 16, 32, 64 or 128.
        x_block_size: None, as `x` is plain.
        use_tma_aligned_col_major_sf: As in `per_token_cast`.
        round_sf: As in `per_token_cast`.
        use_packed_ue8m0: As in `per_token_cast`.
        out: A buffer for the scales that is filled and returned.

    Returns:
        The scales as `per_token_cast` returns them.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> per_token_cast_with_sf_only(torch.full((1, 32), 448.0), "e4m3", 16).tolist()
        [[1.0, 1.0]]
    """
    return PER_TOKEN_CAST_WITH_SF_ONLY(
        x, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, out=out,
    )  # fmt: skip


# ---- data by given scales -----------------------------------------------------------------------


class GivenArguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    sf: Tensor
    x_block_size: list[int] | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool

    def check(self) -> None:
        checks.boolean("round_sf", self.round_sf)
        layout.check_row_major_flags(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        _check_plain_groups(self.x, self.fmt, self.num_per_channels, self.x_block_size)
        shape = (self.x.shape[0], ceil_div(self.x.shape[1], self.num_per_channels))
        dims = ("num_tokens", "groups")
        checks.tensor("sf", self.sf, dims, torch.float32, shape=shape, contiguous=True)

    def outputs(self) -> Out:
        return layout.data_out(self.fmt, *self.x.shape)

    def launches(self, out: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        return launch_cast(
            self.x, None, self.fmt, self.num_per_channels, (0, 0), ROW, False, GIVEN, out, self.sf
        )  # fmt: skip


def given_cost(x: Tensor, fmt: str, sf: Tensor, **_: Any) -> Cost:
    written = x.shape[0] * layout.data_width(fmt, x.shape[1])
    return Cost(bytes=x.numel() * x.element_size() + 4 * sf.numel() + written)


PER_TOKEN_CAST_WITH_PRECOMPUTED_SF = Operator(
    "quant.per_token_cast_with_precomputed_sf",
    GivenArguments,
    reference=reference.per_token_cast_with_precomputed_sf,
    cost=given_cost,
    dynamic={"x": 1, "sf": 1},
    out=("out",),
    instead=layout.CAST_INSTEAD,
)


@PER_TOKEN_CAST_WITH_PRECOMPUTED_SF.public()
def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: list[int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_token_cast` by given scales: `encode(x * (1 / sf))`, saturating.

    Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        num_per_channels: Channels of a scale: 16, 32, 64 or 128.
        sf: The scales, `[num_tokens, groups]`, float32, contiguous.
        x_block_size: None, as `x` is plain.
        use_tma_aligned_col_major_sf: False, as `sf` is row-major.
        round_sf: Has no effect.
        use_packed_ue8m0: False, as `sf` is float32.
        out: A buffer for the data that is filled and returned.

    Returns:
        The data as `per_token_cast` returns them.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> sf = torch.tensor([[2.0]])
        >>> x = torch.full((1, 16), 6.0)
        >>> per_token_cast_with_precomputed_sf(x, "e4m3", 16, sf)[0, 0].item()
        3.0
    """
    return PER_TOKEN_CAST_WITH_PRECOMPUTED_SF(
        x, fmt, num_per_channels, sf, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, out=out,
    )  # fmt: skip
