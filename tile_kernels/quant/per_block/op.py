"""Casts with scales for blocks of rows and channels: data and scales, or either alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.per_block import reference
from tile_kernels.quant.per_block.plan import plan
from tile_kernels.quant.storage import CAST, GIVEN, GROUPS, PACKED, ROW, SCALES
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, row_alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.utils import ceil_div

FORMATS = ("e4m3", "e2m1")

_CAST_BLOCKS = Kernel("tile_kernels.quant.per_block.kernel", "cast_blocks", plan)


class Arguments(NamedTuple):
    x: Tensor
    fmt: str
    block_size: list[int]
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool

    def check(self) -> None:
        layout.check_flags(self.use_tma_aligned_col_major_sf, self.round_sf, self.use_packed_ue8m0)
        _check_blocks(self.x, self.fmt, self.block_size)

    def outputs(self) -> tuple[Out, Out]:
        return layout.data_out(self.fmt, *self.x.shape), scales_outputs(self)._replace(
            name="out_sf"
        )

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        scale_layout = layout.layout_of(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        return _launch(
            self.x, self.fmt, self.block_size, scale_layout, self.round_sf, CAST, out, out_sf
        )


def _check_blocks(x: Tensor, fmt: str, block_size: Sequence[int]) -> None:
    checks.one_of("fmt", fmt, FORMATS)
    layout.check_plain(x)
    layout.check_width(fmt, x.shape[1])
    layout.check_block("block_size", block_size)
    if block_size[0] not in GROUPS or block_size[1] not in GROUPS:
        allowed = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"block_size must be (rows, channels), each of {allowed}, got {tuple(block_size)}"
        )


def _num_blocks(x: Tensor, block_size: Sequence[int]) -> tuple[int, int]:
    return ceil_div(x.shape[0], block_size[0]), ceil_div(x.shape[1], block_size[1])


def scales_outputs(a: Arguments) -> Out:
    scale_layout = layout.layout_of(a.use_tma_aligned_col_major_sf, a.use_packed_ue8m0)
    return layout.scale_out("out", *_num_blocks(a.x, a.block_size), scale_layout)


def _launch(
    x: Any,
    fmt: str,
    block_size: Sequence[int],
    scale_layout: str,
    round_sf: bool,
    task: str,
    out: Spec | None,
    scales: Any,
) -> Launch | None:
    if x.numel() == 0:
        return None
    problem = (
        layout.SOURCES[x.dtype], fmt, x.shape[1], tuple(block_size), scale_layout, round_sf, task,
        row_alignment(x), 16 if out is None else row_alignment(out),
    )  # fmt: skip
    words = None if out is None else layout.as_words(out)
    buffer = scales.view(torch.uint8) if scale_layout == PACKED else scales
    return Launch(_CAST_BLOCKS, problem, (x, words, buffer, layout.FORMATS[fmt].clamp_min))


def scales_launches(a: Arguments, out: Spec) -> Launch | None:
    scale_layout = layout.layout_of(a.use_tma_aligned_col_major_sf, a.use_packed_ue8m0)
    return _launch(a.x, a.fmt, a.block_size, scale_layout, a.round_sf, SCALES, None, out)


def _data_bytes(x: Tensor, fmt: str) -> int:
    return x.numel() * x.element_size() + x.shape[0] * layout.data_width(fmt, x.shape[1])


def cost(
    x: Tensor, fmt: str, block_size: Sequence[int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    scales = layout.scale_bytes(*_num_blocks(x, block_size), use_packed_ue8m0)
    return Cost(bytes=_data_bytes(x, fmt) + scales)


def scales_cost(
    x: Tensor, block_size: Sequence[int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    scales = layout.scale_bytes(*_num_blocks(x, block_size), use_packed_ue8m0)
    return Cost(bytes=x.numel() * x.element_size() + scales)


PER_BLOCK_CAST = Operator(
    "quant.per_block_cast",
    Arguments,
    reference=reference.per_block_cast,
    cost=cost,
    dynamic={"x": 1},
    out=("out", "out_sf"),
    instead=layout.CAST_INSTEAD,
)

PER_BLOCK_CAST_WITH_SF_ONLY = Operator(
    "quant.per_block_cast_with_sf_only",
    Arguments,
    outputs=scales_outputs,
    launches=scales_launches,
    reference=reference.per_block_cast_with_sf_only,
    cost=scales_cost,
    dynamic={"x": 1},
    out=("out",),
    instead=layout.CAST_INSTEAD,
)


@PER_BLOCK_CAST.public()
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantizes with a scale for every block of rows and channels.

    Scales, their layouts, NaN and infinities are as in `per_token_cast`, with rows of blocks
    instead of tokens. The last block of a row or column may be smaller. Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        block_size: `(rows, channels)` of a scale, each 16, 32, 64 or 128.
        use_tma_aligned_col_major_sf: As in `per_token_cast`.
        round_sf: As in `per_token_cast`.
        use_packed_ue8m0: As in `per_token_cast`.
        out: Buffers `(data, scales)` that are filled and returned.

    Returns:
        `(data, scales)`. The data are `[num_tokens, hidden]` float8_e4m3fn, or `[num_tokens,
        hidden / 2]` int8 (e2m1). The scales are `[ceil(num_tokens / rows), channel_blocks]`
        float32, with `channel_blocks = ceil(hidden / channels)`, or
        `[.., ceil(channel_blocks / 4)]` int32 if packed.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> data, scales = per_block_cast(torch.full((48, 32), 448.0), "e4m3", (32, 32))
        >>> data[0, 0].item(), scales.tolist()
        (448.0, [[1.0], [1.0]])
    """
    return PER_BLOCK_CAST(
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out=out
    )


@PER_BLOCK_CAST_WITH_SF_ONLY.public()
def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The scales of `per_block_cast` without the data.

    Only the scales are allocated. Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        block_size: `(rows, channels)` of a scale, each 16, 32, 64 or 128.
        use_tma_aligned_col_major_sf: As in `per_token_cast`.
        round_sf: As in `per_token_cast`.
        use_packed_ue8m0: As in `per_token_cast`.
        out: A buffer for the scales that is filled and returned.

    Returns:
        The scales as `per_block_cast` returns them.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> per_block_cast_with_sf_only(torch.full((48, 32), 448.0), "e4m3", (32, 32)).tolist()
        [[1.0], [1.0]]
    """
    return PER_BLOCK_CAST_WITH_SF_ONLY(
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out=out
    )


# ---- data by given scales -----------------------------------------------------------------------


class GivenArguments(NamedTuple):
    x: Tensor
    fmt: str
    block_size: list[int]
    sf: Tensor
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool

    def check(self) -> None:
        checks.boolean("round_sf", self.round_sf)
        layout.check_row_major_flags(self.use_tma_aligned_col_major_sf, self.use_packed_ue8m0)
        _check_blocks(self.x, self.fmt, self.block_size)
        dims, shape = ("row_blocks", "channel_blocks"), _num_blocks(self.x, self.block_size)
        checks.tensor("sf", self.sf, dims, torch.float32, shape=shape, unit_inner_stride=True)

    def outputs(self) -> Out:
        return layout.data_out(self.fmt, *self.x.shape)

    def launches(self, out: Spec) -> Launch | None:
        return _launch(self.x, self.fmt, self.block_size, ROW, False, GIVEN, out, self.sf)


def given_cost(x: Tensor, fmt: str, sf: Tensor, **_: Any) -> Cost:
    return Cost(bytes=_data_bytes(x, fmt) + 4 * sf.numel())


PER_BLOCK_CAST_WITH_PRECOMPUTED_SF = Operator(
    "quant.per_block_cast_with_precomputed_sf",
    GivenArguments,
    reference=reference.per_block_cast_with_precomputed_sf,
    cost=given_cost,
    dynamic={"x": 1, "sf": 1},
    out=("out",),
    instead=layout.CAST_INSTEAD,
)


@PER_BLOCK_CAST_WITH_PRECOMPUTED_SF.public()
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_block_cast` by given scales: `encode(x * (1 / sf))`, saturating.

    Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        block_size: `(rows, channels)` of a scale, each 16, 32, 64 or 128.
        sf: The scales, `[ceil(num_tokens / rows), ceil(hidden / channels)]`, float32, any row
            stride.
        use_tma_aligned_col_major_sf: False, as `sf` is row-major.
        round_sf: Has no effect.
        use_packed_ue8m0: False, as `sf` is float32.
        out: A buffer for the data that is filled and returned.

    Returns:
        The data as `per_block_cast` returns them.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> sf = torch.tensor([[2.0]])
        >>> x = torch.full((32, 16), 6.0)
        >>> per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf)[0, 0].item()
        3.0
    """
    return PER_BLOCK_CAST_WITH_PRECOMPUTED_SF(
        x, fmt, block_size, sf, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out=out
    )
