"""Casts with scales for blocks of rows and channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.blocks import PER_BLOCK_CAST, PER_BLOCK_GIVEN, PER_BLOCK_SCALES
from tile_kernels.quant.layout import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty, row_alignment
from tile_kernels.runtime.op import face, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import quant as oracles
from tile_kernels.utils import ceil_div

SIZES = (16, 32, 64, 128)
FORMATS = ("e4m3", "e2m1")

_CAST_BLOCKS = Kernel("tile_kernels.quant.kernels.blocks", "cast_blocks")


def _check_blocks(x: Tensor, fmt: str, block_size: list[int]) -> None:
    checks.one_of("fmt", fmt, FORMATS)
    layout.check_plain(x)
    layout.check_width(fmt, x.shape[1])
    layout.check_block("block_size", block_size)
    if block_size[0] not in SIZES or block_size[1] not in SIZES:
        allowed = ", ".join(map(str, SIZES))
        raise ValueError(
            f"block_size must be (rows, channels), each of {allowed}, got {tuple(block_size)}"
        )


def _check_cast(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> None:
    layout.check_flags(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    _check_blocks(x, fmt, block_size)


def _launch(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    how: str,
    round_sf: bool,
    task: str,
    out: Tensor | None,
    scales: Tensor,
) -> None:
    problem = (
        layout.SOURCES[x.dtype], fmt, x.shape[1], tuple(block_size), how, round_sf, task,
        row_alignment(x), 16 if out is None else row_alignment(out),
    )  # fmt: skip
    words = None if out is None else layout.as_words(out)
    clamp_min = layout.FORMATS[fmt].clamp_min
    buffer = scales.view(torch.uint8) if how == layout.PACKED else scales
    _CAST_BLOCKS.launch(problem, x, words, buffer, clamp_min)


def _blocks(x: Tensor, block_size: list[int]) -> tuple[int, int]:
    return ceil_div(x.shape[0], block_size[0]), ceil_div(x.shape[1], block_size[1])


def _scale_bytes(x: Tensor, block_size: list[int], packed: bool) -> int:
    rows, groups = _blocks(x, block_size)
    return 4 * rows * (ceil_div(groups, 4) if packed else groups)


def _data_bytes(x: Tensor, fmt: str) -> int:
    return x.numel() * x.element_size() + x.shape[0] * layout.data_shape(fmt, 1, x.shape[1])[1]


def _cost(
    x: Tensor, fmt: str, block_size: list[int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    return Cost(bytes=_data_bytes(x, fmt) + _scale_bytes(x, block_size, use_packed_ue8m0))


@op(
    check=_check_cast,
    oracle=oracles.per_block_cast,
    cost=_cost,
    cases=PER_BLOCK_CAST,
    instead=layout.CAST_INSTEAD,
    outputs=("out", "out_sf"),
    name="per_block_cast",
)
def _cast(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
    out_sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    how = layout.layout_of(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    dtype = layout.FORMATS[fmt].dtype
    out = output("out", out, x, layout.data_shape(fmt, *x.shape), dtype)
    out_sf, scales = layout.scale_buffer("out_sf", out_sf, x, *_blocks(x, block_size), how)
    if nonempty(x):
        _launch(x, fmt, block_size, how, round_sf, "cast", out, scales)
    return out, out_sf


@face(_cast, oracle=oracles.per_block_cast)
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantise with a scale for every block of rows and channels.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, hidden]`, any row stride | bfloat16, float32 |
    | `fmt` | | `e4m3`, `e2m1` |
    | `block_size` | | rows and channels of a scale, each 16, 32, 64 or 128 |
    | `out` | as returned; filled and returned | |
    | returns data | `[num_tokens, hidden]`, e2m1 `hidden / 2` | float8_e4m3fn, int8 |
    | returns scales | `[ceil(num_tokens / rows), ceil(hidden / channels)]` | float32, int32 |

    Scales, their layouts, NaN and infinities are as in `per_token_cast`, with rows of blocks
    instead of tokens. The last block of a row or column may be smaller.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> data, scales = per_block_cast(torch.full((48, 32), 448.0), "e4m3", (32, 32))
    >>> data[0, 0].item(), scales.tolist()
    (448.0, [[1.0], [1.0]])
    """
    arguments = (
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    )  # fmt: skip
    return _cast(*arguments, *layout.buffers(out))  # type: ignore[arg-type]


# ---- scales alone, data by given scales ---------------------------------------------------------


def _cost_scales(
    x: Tensor, block_size: list[int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    read = x.numel() * x.element_size()
    return Cost(bytes=read + _scale_bytes(x, block_size, use_packed_ue8m0))


@op(
    check=_check_cast,
    oracle=oracles.per_block_cast_with_sf_only,
    cost=_cost_scales,
    cases=PER_BLOCK_SCALES,
    instead=layout.CAST_INSTEAD,
    outputs=("out",),
)
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

    Arguments as there. Only the scales are allocated; with `out` they go there.

    >>> per_block_cast_with_sf_only(torch.full((48, 32), 448.0), "e4m3", (32, 32)).tolist()
    [[1.0], [1.0]]
    """
    how = layout.layout_of(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    out, scales = layout.scale_buffer("out", out, x, *_blocks(x, block_size), how)
    if nonempty(x):
        _launch(x, fmt, block_size, how, round_sf, "scales", None, scales)
    return out


def _check_given(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> None:
    checks.boolean("round_sf", round_sf)
    layout.check_row_major_flags(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    _check_blocks(x, fmt, block_size)
    dims, shape = ("row_blocks", "channel_blocks"), _blocks(x, block_size)
    checks.tensor("sf", sf, dims, torch.float32, shape=shape, unit_inner_stride=True)


def _cost_given(x: Tensor, fmt: str, sf: Tensor, **_: Any) -> Cost:
    return Cost(bytes=_data_bytes(x, fmt) + 4 * sf.numel())


@op(
    check=_check_given,
    oracle=oracles.per_block_cast_with_precomputed_sf,
    cost=_cost_given,
    cases=PER_BLOCK_GIVEN,
    instead=layout.CAST_INSTEAD,
    outputs=("out",),
)
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,  # noqa: ARG001 - there for the signature
    round_sf: bool = False,  # noqa: ARG001
    use_packed_ue8m0: bool = False,  # noqa: ARG001
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_block_cast` by given scales: `encode(x * (1 / sf))`, saturating.

    Arguments as there; `sf` is float32 `[ceil(num_tokens / rows), ceil(hidden / channels)]`, of any
    row stride. `round_sf` has no effect; the layout flags must be False.

    >>> sf = torch.tensor([[2.0]])
    >>> x = torch.full((32, 16), 6.0)
    >>> per_block_cast_with_precomputed_sf(x, "e4m3", (32, 32), sf)[0, 0].item()
    3.0
    """
    dtype = layout.FORMATS[fmt].dtype
    out = output("out", out, x, layout.data_shape(fmt, *x.shape), dtype)
    if nonempty(x):
        _launch(x, fmt, block_size, layout.ROW, False, "given", out, sf)
    return out
