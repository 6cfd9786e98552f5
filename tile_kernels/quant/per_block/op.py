"""Casts with scales for blocks of rows and channels: data and scales, or either alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.per_block import reference
from tile_kernels.quant.per_block.plan import plan
from tile_kernels.quant.scales import num_blocks
from tile_kernels.quant.storage import CAST, GIVEN, GROUPS, ROW, SCALES, is_packed
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, row_alignment
from tile_kernels.runtime.launch import Kernel

FORMATS = ("e4m3", "e2m1")

_CAST_BLOCKS = Kernel("tile_kernels.quant.per_block.kernel", "cast_blocks", plan)


def _check_blocks(a: Blocks | GivenArguments) -> None:
    checks.one_of("fmt", a.fmt, FORMATS)
    layout.check_plain(a.x)
    layout.check_width(a.fmt, a.x.shape[1])
    layout.check_block("block_size", a.block_size)
    if a.block_size[0] not in GROUPS or a.block_size[1] not in GROUPS:
        allowed = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"block_size must be (rows, channels), each of {allowed}, got {tuple(a.block_size)}"
        )


def _launch(
    a: Any, scale_layout: str, round_sf: bool, task: str, out: Spec | None, scales: Any
) -> Launch | None:
    x = a.x
    if x.numel() == 0:
        return None
    problem = (
        layout.SOURCES[x.dtype], a.fmt, x.shape[1], tuple(a.block_size), scale_layout, round_sf,
        task, row_alignment(x), 16 if out is None else row_alignment(out),
    )  # fmt: skip
    words = None if out is None else layout.as_words(out)
    buffer = scales.view(torch.uint8) if is_packed(scale_layout) else scales
    clamp_min = float(getattr(a, "amax_min", 1.0))  # given scales need none
    return Launch(_CAST_BLOCKS, problem, (x, words, buffer, clamp_min))


# ---- data and scales ----------------------------------------------------------------------------


class Blocks(NamedTuple):
    x: Tensor
    fmt: str
    block_size: list[int]
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    amax_min: float

    def check(self) -> None:
        layout.check_flags(self)
        _check_blocks(self)
        layout.check_amax_min(self.amax_min, self.fmt)

    def _launch(self, task: str, out: Spec | None, scales: Spec) -> Launch | None:
        return _launch(self, layout.layout_of(self), self.round_sf, task, out, scales)


class Arguments(Blocks):
    def outputs(self) -> tuple[Out, Out]:
        return layout.cast_outs(self, self.fmt, self.x.shape, self.block_size)

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        return self._launch(CAST, out, out_sf)


def cost(
    x: Tensor, fmt: str, block_size: Sequence[int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    return layout.cast_cost(x, fmt, x.shape, block_size, use_packed_ue8m0)


PER_BLOCK_CAST = layout.cast_operator(reference.per_block_cast, Arguments, cost)


@PER_BLOCK_CAST.public()
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Quantizes with a scale for every block of rows and channels.

    Scales, their layouts, NaN and infinities are as in `per_token_cast`, with rows of blocks
    instead of tokens. The last block of a row or column may be smaller. Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        block_size: `(rows, channels)` of a scale, each 16, 32, 64 or 128.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: As in `per_token_cast`.
        out: Buffers `(data, scales)` that are filled and returned.
        amax_min: As in `per_token_cast`.

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
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0,
        layout.least_amax(fmt, False, amax_min), out=out,
    )  # fmt: skip


# ---- scales alone -------------------------------------------------------------------------------


class ScalesArguments(Blocks):
    def outputs(self) -> Out:
        blocks = num_blocks(self.x.shape, self.block_size)
        return layout.scale_out("out", *blocks, layout.layout_of(self))

    def launches(self, out: Spec) -> Launch | None:
        return self._launch(SCALES, None, out)


def scales_cost(
    x: Tensor, block_size: Sequence[int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    return layout.scales_cost(x, block_size, use_packed_ue8m0)


PER_BLOCK_CAST_WITH_SF_ONLY = layout.cast_operator(
    reference.per_block_cast_with_sf_only, ScalesArguments, scales_cost
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
    *,
    amax_min: float | None = None,
) -> Tensor:
    """Computes the scales of `per_block_cast` without the data.

    Only the scales are allocated. Not differentiable. Errors are those of `per_block_cast`.

    Args:
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: As in
            `per_block_cast`.
        out: A buffer for the scales that is filled and returned.
        amax_min: As in `per_token_cast`.

    Returns:
        The scales as `per_block_cast` returns them.

    Example:
        >>> per_block_cast_with_sf_only(torch.full((48, 32), 448.0), "e4m3", (32, 32)).tolist()
        [[1.0], [1.0]]
    """
    return PER_BLOCK_CAST_WITH_SF_ONLY(
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0,
        layout.least_amax(fmt, False, amax_min), out=out,
    )  # fmt: skip


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
        layout.check_row_major_flags(self)
        _check_blocks(self)
        dims, shape = ("row_blocks", "channel_blocks"), num_blocks(self.x.shape, self.block_size)
        checks.tensor("sf", self.sf, dims, torch.float32, shape=shape, unit_inner_stride=True)

    def outputs(self) -> Out:
        return layout.data_out(self.fmt, *self.x.shape)

    def launches(self, out: Spec) -> Launch | None:
        return _launch(self, ROW, False, GIVEN, out, self.sf)


PER_BLOCK_CAST_WITH_PRECOMPUTED_SF = layout.cast_operator(
    reference.per_block_cast_with_precomputed_sf, GivenArguments, layout.given_cost
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
    """Computes the data of `per_block_cast` from given scales: `encode(x * (1 / sf))`, saturating.

    Not differentiable. Errors are those of `per_block_cast`.

    Args:
        x, fmt, block_size: As in `per_block_cast`.
        sf: The scales, `[ceil(num_tokens / rows), ceil(hidden / channels)]`, float32, any row
            stride.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out: As in
            `per_token_cast_with_precomputed_sf`.

    Returns:
        The data as `per_block_cast` returns them.

    Example:
        >>> sf = torch.tensor([[2.0]])
        >>> x = torch.full((32, 16), 6.0)
        >>> per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf)[0, 0].item()
        3.0
    """
    return PER_BLOCK_CAST_WITH_PRECOMPUTED_SF(
        x, fmt, block_size, sf, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out=out
    )
