"""Casts with scales along rows (tokens)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.tokens import PER_TOKEN_CAST, PER_TOKEN_GIVEN, PER_TOKEN_SCALES
from tile_kernels.quant.layout import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty, row_alignment
from tile_kernels.runtime.op import face, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import quant as oracles
from tile_kernels.utils import ceil_div

GROUPS = (16, 32, 64, 128)

_CAST_GROUPS = Kernel("tile_kernels.quant.kernels.tokens", "cast_groups")
_CAST_WHOLE_ROWS = Kernel("tile_kernels.quant.kernels.tokens", "cast_whole_rows")


def is_whole(fmt: str, width: int, group: int) -> bool:
    """Whether a block takes a whole row, which has one scale, and not warps its groups."""
    return fmt == "e5m6" or (group == width and group not in GROUPS)


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


def _check_cast(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_channels: int,
    block_rows: int,
    block_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> None:
    layout.check_flags(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if x_sf is None:
        check_plain_cast(x, fmt, num_per_channels)
        if block_rows or block_channels:
            raise ValueError("x_block_size is for a quantised x, a tuple of data and scales")
        return
    checks.one_of("fmt", fmt, tuple(layout.FORMATS))
    dims = ("num_tokens", "hidden")
    checks.tensor("x", x, dims, (torch.float8_e4m3fn, torch.int8), unit_inner_stride=True)
    if fmt == "e5m6":
        raise ValueError("x must be a plain tensor for e5m6, got quantised data")
    if not (block_rows and block_channels):
        raise ValueError("x_block_size must say the scale blocks of a quantised x, got None")
    layout.check_source_scales(x, x_sf, (block_rows, block_channels))
    _check_rows(layout.values_in(x), fmt, num_per_channels)


def launch(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    group: int,
    block: tuple[int, int],
    how: str,
    round_sf: bool,
    task: str,
    out: Tensor | None,
    scales: Tensor | None,
) -> None:
    """Run the kernel for a task: `cast`, `scales` alone, data by `given` scales, or `fake`."""
    width = layout.values_in(x)
    words = None if out is None else layout.as_words(out)
    problem = (
        layout.SOURCES[x.dtype], fmt, width, group, how, round_sf, task, block,
        x_sf is not None and x_sf.dtype == torch.int32, row_alignment(x),
        16 if out is None else row_alignment(out),
    )  # fmt: skip
    clamp_min = layout.FORMATS[fmt].clamp_min
    kernel = _CAST_WHOLE_ROWS if is_whole(fmt, width, group) else _CAST_GROUPS
    kernel.launch(problem, layout.as_words(x), x_sf, words, scales, clamp_min)


def _cost(
    x: Tensor | QuantTensor, fmt: str, num_per_channels: int, use_packed_ue8m0: bool, **_: Any
) -> Cost:
    data, sf = layout.pair(x)
    rows, width = data.shape[0], layout.values_in(data)
    read = data.numel() * data.element_size() + (0 if sf is None else 4 * sf.numel())
    groups = ceil_div(width, num_per_channels)
    written = 4 * rows * (ceil_div(groups, 4) if use_packed_ue8m0 else groups)
    return Cost(bytes=read + written + rows * layout.data_shape(fmt, 1, width)[1])


def _oracle_cast(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_channels: int,
    block_rows: int,
    block_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> QuantTensor:
    source = x if x_sf is None else (x, x_sf)
    block = None if x_sf is None else (block_rows, block_channels)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return oracles.per_token_cast(source, fmt, num_per_channels, block, *flags)


@op(
    check=_check_cast,
    oracle=_oracle_cast,
    cost=_cost,
    cases=PER_TOKEN_CAST,
    instead=layout.CAST_INSTEAD,
    outputs=("out", "out_sf"),
    name="per_token_cast",
)
def _cast(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_channels: int,
    block_rows: int,
    block_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    out: Tensor | None = None,
    out_sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape[0], layout.values_in(x)
    how = layout.layout_of(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    dtype = layout.FORMATS[fmt].dtype
    out = output("out", out, x, layout.data_shape(fmt, rows, width), dtype)
    groups = ceil_div(width, num_per_channels)
    out_sf, scales = layout.scale_buffer("out_sf", out_sf, x, rows, groups, how)
    if nonempty(x):
        block = (block_rows, block_channels)
        args = (how, round_sf, "cast", out, scales)
        launch(x, x_sf, fmt, num_per_channels, block, *args)
    return out, out_sf


@face(_cast, oracle=oracles.per_token_cast)
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
    """Quantise rows, with a scale for every group of channels or for a whole row.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, hidden]`, any row stride | bfloat16, float32 |
    | or `x`, with `x_block_size` | `(data, scales)` | e4m3, or int8 of two e2m1 each |
    | `fmt` | | `e4m3`, `e2m1`, `e5m6` (one scale per row) |
    | `num_per_channels` | | 16, 32, 64, 128, or `hidden`: channels of a scale |
    | `x_block_size` | | rows and channels of a scale of a quantised `x` |
    | `out` | as returned; filled and returned | |
    | returns data | `[num_tokens, hidden]`, e2m1 `hidden / 2`, e5m6 `3 hidden / 2` | \
float8_e4m3fn, int8, uint8 |
    | returns scales | `[num_tokens, groups]`, see below | float32, int32 |

    `value = code * scale`, `code = encode(value * inv)`: with `a` the largest magnitude of a group
    (at least 1e-4; for e2m1 6 * 2**-126), `scale = a / max` and `inv = max / a`; `round_sf` takes
    the next power of two as scale. The last group may be short. A quantised `x` is multiplied by
    its scales first.

    Scales are contiguous. With `use_tma_aligned_col_major_sf` their strides are `(1, n)`, with `n`
    the tokens rounded up to a multiple of 4; with `use_packed_ue8m0` as well (and `round_sf`) an
    int32 holds the exponents of four groups. Padding and unused bytes are zero.

    A NaN gets the NaN of the format (e2m1: 6) and does not count for the scale; an infinity counts
    as the largest float32 and saturates.

    Codes are the nearest, ties to even. e5m6 makes an exception of scaled magnitudes below
    `2**-14`: these are truncated to a multiple of `2**-20`, plus a carry that the low 17 bits of
    the float32 decide, so that even the smallest can become `2**-20`. In e5m6, and with `round_sf`
    in every format, the largest finite float32 comes back as infinity.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable: see
    `fake_cast`.

    >>> data, scales = per_token_cast(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 4)
    >>> data.float().tolist(), scales.tolist()
    ([[64.0, -128.0, 192.0, 448.0]], [[0.015625]])
    """
    data, sf = layout.pair(x)
    if x_block_size is not None:
        layout.check_block("x_block_size", x_block_size)
    block = x_block_size or (0, 0)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    arguments = (data, sf, fmt, num_per_channels, *block, *flags)
    return _cast(*arguments, *layout.buffers(out))


def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """`per_token_cast(x, "e5m6", ...)`: `num_per_channels` is the row width.

    What that says of magnitudes below `2**-14`, which are not rounded to nearest, holds here.

    >>> per_token_cast_to_e5m6(torch.ones(1, 8), 8)[0].shape
    torch.Size([1, 12])
    """
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, "e5m6", num_per_channels, None, *flags, out)


# ---- scales alone, data by given scales ---------------------------------------------------------

_PLAIN_FORMATS = ("e4m3", "e2m1")


def _check_variant(
    x: Tensor, fmt: str, num_per_channels: int, x_block_size: list[int] | None
) -> None:
    checks.one_of("fmt", fmt, _PLAIN_FORMATS)
    layout.check_plain(x)
    if x_block_size is not None:
        given = checks.shown(x_block_size)
        raise ValueError(f"x_block_size must be None, as x is plain, got {given}")
    layout.check_width(fmt, x.shape[1])
    _check_group(num_per_channels, x.shape[1], whole=False)


def _check_scales(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: list[int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> None:
    layout.check_flags(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_variant(x, fmt, num_per_channels, x_block_size)


def _cost_scales(x: Tensor, num_per_channels: int, use_packed_ue8m0: bool, **_: Any) -> Cost:
    groups = ceil_div(x.shape[1], num_per_channels)
    groups = ceil_div(groups, 4) if use_packed_ue8m0 else groups
    return Cost(bytes=x.numel() * x.element_size() + 4 * x.shape[0] * groups)


@op(
    check=_check_scales,
    oracle=oracles.per_token_cast_with_sf_only,
    cost=_cost_scales,
    cases=PER_TOKEN_SCALES,
    instead=layout.CAST_INSTEAD,
    outputs=("out",),
)
def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: list[int] | None = None,  # noqa: ARG001 - there for the signature
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The scales of `per_token_cast` without the data.

    Arguments as there, for a plain `x`, `e4m3` or `e2m1`, and groups of 16, 32, 64 or 128. Only the
    scales are allocated; with `out` they go there.

    >>> per_token_cast_with_sf_only(torch.full((1, 32), 448.0), "e4m3", 16).tolist()
    [[1.0, 1.0]]
    """
    how = layout.layout_of(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    groups = ceil_div(x.shape[1], num_per_channels)
    out, scales = layout.scale_buffer("out", out, x, x.shape[0], groups, how)
    if nonempty(x):
        launch(x, None, fmt, num_per_channels, (0, 0), how, round_sf, "scales", None, scales)
    return out


def _check_given(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: list[int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> None:
    checks.boolean("round_sf", round_sf)
    layout.check_row_major_flags(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    _check_variant(x, fmt, num_per_channels, x_block_size)
    shape = (x.shape[0], ceil_div(x.shape[1], num_per_channels))
    dims = ("num_tokens", "groups")
    checks.tensor("sf", sf, dims, torch.float32, shape=shape, contiguous=True)


def _cost_given(x: Tensor, fmt: str, sf: Tensor, **_: Any) -> Cost:
    written = x.shape[0] * layout.data_shape(fmt, 1, x.shape[1])[1]
    return Cost(bytes=x.numel() * x.element_size() + 4 * sf.numel() + written)


@op(
    check=_check_given,
    oracle=oracles.per_token_cast_with_precomputed_sf,
    cost=_cost_given,
    cases=PER_TOKEN_GIVEN,
    instead=layout.CAST_INSTEAD,
    outputs=("out",),
)
def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: list[int] | None = None,  # noqa: ARG001 - there for the signature
    use_tma_aligned_col_major_sf: bool = False,  # noqa: ARG001
    round_sf: bool = False,  # noqa: ARG001
    use_packed_ue8m0: bool = False,  # noqa: ARG001
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_token_cast` by given scales: `encode(x * (1 / sf))`, saturating.

    Arguments as there, for a plain `x`, `e4m3` or `e2m1`, and groups of 16, 32, 64 or 128; `sf` is
    float32 `[num_tokens, groups]`, contiguous. `round_sf` has no effect; the layout flags must be
    False.

    >>> sf = torch.tensor([[2.0]])
    >>> x = torch.full((1, 16), 6.0)
    >>> per_token_cast_with_precomputed_sf(x, "e4m3", 16, sf)[0, 0].item()
    3.0
    """
    dtype = layout.FORMATS[fmt].dtype
    out = output("out", out, x, layout.data_shape(fmt, *x.shape), dtype)
    if nonempty(x):
        args = (layout.ROW, False, "given", out, sf)
        launch(x, None, fmt, num_per_channels, (0, 0), *args)
    return out
