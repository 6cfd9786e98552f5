"""From e2m1 to e4m3 in larger blocks, without loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.lossless import PER_BLOCK_CAST_LOSSLESS
from tile_kernels.quant.layout import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty, row_alignment
from tile_kernels.runtime.op import face, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import quant as oracles
from tile_kernels.torch import scales as scale_layouts
from tile_kernels.utils import ceil_div

MOST_CHANNELS = 4096  # of a block: 16 for each thread
MOST_RATIO = 11  # in powers of two

_CAST_LOSSLESS = Kernel("tile_kernels.quant.kernels.lossless", "cast_lossless")


def _check_lossless(
    x: Tensor,
    x_sf: Tensor,
    fmt: str,
    x_block_size: list[int],
    out_block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> None:
    checks.one_of("fmt", fmt, ("e4m3",))
    checks.boolean("round_sf", round_sf)
    # Scales are powers of two in any case: round_sf does not matter.
    layout.check_flags(use_tma_aligned_col_major_sf, True, use_packed_ue8m0)
    checks.tensor("x", x, ("num_tokens", "hidden / 2"), torch.int8, unit_inner_stride=True)
    if x.shape[1] == 0:
        raise ValueError("x must have at least two channels, got 0")
    layout.check_block("x_block_size", x_block_size)
    layout.check_block("out_block_size", out_block_size)
    channels = out_block_size[1]
    if out_block_size[0] % x_block_size[0] or channels % x_block_size[1]:
        raise ValueError(
            f"out_block_size must be a multiple of x_block_size, {tuple(x_block_size)}, in both "
            f"dimensions, got {tuple(out_block_size)}"
        )
    if channels & (channels - 1) or not 2 <= channels <= MOST_CHANNELS:
        raise ValueError(
            f"out_block_size must have a power of two of channels, 2 to {MOST_CHANNELS}, got "
            f"{tuple(out_block_size)}"
        )
    layout.check_source_scales(x, x_sf, (x_block_size[0], x_block_size[1]))


def _check_ratio(
    x: Tensor,
    x_sf: Tensor,
    fmt: str,  # noqa: ARG001 - this and the rest: there for the signature
    x_block_size: list[int],
    out_block_size: list[int],
    *_: Any,
    **__: Any,
) -> None:
    """No scale in a block of the result is more than 2**11 times another one."""
    rows, groups = ceil_div(x.shape[0], x_block_size[0]), ceil_div(2 * x.shape[1], x_block_size[1])
    ratio = out_block_size[0] // x_block_size[0], out_block_size[1] // x_block_size[1]
    exponents = scale_layouts.read_exponents(x_sf)[:rows, :groups].int()
    largest = scale_layouts.block_max(exponents, ratio)
    below = scale_layouts.expand_blocks(largest, ratio, exponents.shape) - exponents
    bad = below > MOST_RATIO
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"x_sf must vary by at most 2**{MOST_RATIO} within a block of the result, but element "
            f"{where} is 2**-{below[tuple(where)].item()} of the largest"
        )


def _cost(
    x: QuantTensor, out_block_size: tuple[int, int], use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
    data, sf = x
    rows = ceil_div(data.shape[0], out_block_size[0])
    groups = ceil_div(2 * data.shape[1], out_block_size[1])
    written = 4 * rows * (ceil_div(groups, 4) if use_packed_ue8m0 else groups)
    return Cost(bytes=3 * data.numel() + 4 * sf.numel() + written)


def _oracle_lossless(
    x: Tensor,
    x_sf: Tensor,
    fmt: str,
    x_block_size: list[int],
    out_block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    blocks = (x_block_size[0], x_block_size[1]), (out_block_size[0], out_block_size[1])
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return oracles.per_block_cast_lossless((x, x_sf), fmt, *blocks, *flags)


@op(
    check=_check_lossless,
    oracle=_oracle_lossless,
    cost=_cost,
    cases=PER_BLOCK_CAST_LOSSLESS,
    instead=layout.CAST_INSTEAD,
    outputs=("out", "out_sf"),
    values=_check_ratio,
    name="per_block_cast_lossless",
)
def _cast(
    x: Tensor,
    x_sf: Tensor,
    fmt: str,
    x_block_size: list[int],
    out_block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,  # noqa: ARG001 - there for the signature
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
    out_sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape[0], 2 * x.shape[1]
    how = layout.layout_of(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    out = output("out", out, x, (rows, width), layout.FORMATS[fmt].dtype)
    blocks = ceil_div(rows, out_block_size[0]), ceil_div(width, out_block_size[1])
    out_sf, scales = layout.scale_buffer("out_sf", out_sf, x, *blocks, how)
    if nonempty(x):
        aligned, out_aligned = row_alignment(x), row_alignment(out)
        # Eight values share a word of x, and a scale.
        words = not (width % 8 or x_block_size[1] % 8 or aligned % 4 or out_aligned % 8)
        problem = (
            width, tuple(x_block_size), x_sf.dtype == torch.int32, tuple(out_block_size), how,
            words, aligned, out_aligned,
        )  # fmt: skip
        _CAST_LOSSLESS.launch(
            problem,
            x.view(torch.uint32 if words else torch.uint8),
            x_sf,
            out.view(torch.uint32) if words else out,
            scales.view(torch.uint8) if how == layout.PACKED else scales,
        )
    return out, out_sf


@face(_cast, oracle=oracles.per_block_cast_lossless, check=layout.check_pair)
def per_block_cast_lossless(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """From e2m1 to e4m3 in larger blocks, with the same values.

    | argument | shape | dtype |
    |---|---|---|
    | `x`, data | `[num_tokens, hidden / 2]`, any row stride | int8, two e2m1 each |
    | `x`, scales | `[ceil(num_tokens / rows), ceil(hidden / channels)]`, any strides | float32 |
    | or | `[.., ceil(channel_blocks / 4)]`, four exponents each | int32 |
    | `fmt` | | `e4m3` |
    | `x_block_size` | | rows and channels of a scale of `x` |
    | `out_block_size` | | of the result: multiples of those; channels a power of two up to 4096 |
    | `out` | as returned; filled and returned | |
    | returns data | `[num_tokens, hidden]` | float8_e4m3fn |
    | returns scales | as `per_block_cast`, powers of two | float32, int32 |

    Scales of `x` are powers of two; of others only the exponent counts. With their biased exponents
    `e_in`, that of an output block is `e_out = max(max(e_in) - 6, 1)`, and an element becomes
    `e4m3(value * 2**(e_in - e_out))`. That is exact if no scale in the block is more than `2**11`
    times another one; beyond, the smaller elements are rounded to nearest, and the checked mode
    (`tile_kernels.checked`) raises. A scale of zero makes zeros. `round_sf` has no effect.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> x = torch.tensor([[0x21, 0x43]], dtype=torch.int8), torch.tensor([[1.0, 0.25]])
    >>> data, scales = per_block_cast_lossless(x, "e4m3", (1, 2), (1, 4))
    >>> data.float().tolist(), scales.tolist()
    ([[32.0, 64.0, 24.0, 32.0]], [[0.015625]])
    """
    data, sf = x
    arguments = (
        data, sf, fmt, x_block_size, out_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0,
    )  # fmt: skip
    return _cast(*arguments, *layout.buffers(out))  # type: ignore[arg-type]
