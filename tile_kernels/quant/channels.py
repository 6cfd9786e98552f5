"""Casts with scales along channels: a scale for every 32 or 128 tokens of a channel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.channels import (
    PER_CHANNEL_CAST,
    PER_CHANNEL_CAST_AND_TRANSPOSE,
    PER_CHANNEL_CAST_FUSED,
    SWIGLU_AND_PER_CHANNEL_CAST,
)
from tile_kernels.quant.layout import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cases, Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import formats
from tile_kernels.torch import quant as oracles
from tile_kernels.utils import ceil_div

GROUPS = (32, 128)
SOURCE_GROUP = 128  # channels of a scale of a quantised x

_CAST_COLUMNS = Kernel("tile_kernels.quant.kernels.channels", "cast_columns")


def _check_flags(fmt: str, num_per_tokens: int, round_sf: bool) -> None:
    checks.one_of("fmt", fmt, ("e4m3",))
    checks.integer("num_per_tokens", num_per_tokens, 1)
    checks.one_of("num_per_tokens", num_per_tokens, GROUPS)
    checks.boolean("round_sf", round_sf)


def _cost(read: int, rows: int, width: int, num_per_tokens: int) -> Cost:
    return Cost(bytes=read + rows * width + 4 * ceil_div(rows, num_per_tokens) * width)


def _outputs(
    out: Tensor | None,
    out_sf: Tensor | None,
    like: Tensor,
    rows: int,
    width: int,
    num_per_tokens: int,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The data and the scales to fill."""
    shape = (width, rows) if transposed else (rows, width)
    out = output("out", out, like, shape, torch.float8_e4m3fn)
    shape = (ceil_div(rows, num_per_tokens), width)
    return out, output("out_sf", out_sf, like, shape, torch.float32)


def _launch(
    x: Tensor,
    out: Tensor,
    out_sf: Tensor,
    num_per_tokens: int,
    round_sf: bool,
    *,
    x_sf: Tensor | None = None,
    pos_to_token: Tensor | None = None,
    transposed: bool = False,
    activation: str = "none",
    clamp: float = math.inf,
) -> None:
    rows, width = reversed(out.shape) if transposed else out.shape
    problem = (
        layout.SOURCES[x.dtype], activation, transposed, num_per_tokens, round_sf,
        pos_to_token is not None, rows, width, x.stride(0), alignment(x), alignment(out),
    )  # fmt: skip
    clamp_min = formats.E4M3.clamp_min
    _CAST_COLUMNS.launch(problem, x, x_sf, pos_to_token, out, out_sf, clamp_min, clamp)


# ---- as it is ------------------------------------------------------------------------------------


def _check_cast(x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool) -> None:
    layout.check_plain(x)
    layout.check_width("e4m3", x.shape[1])
    _check_flags(fmt, num_per_tokens, round_sf)


def _cost_cast(x: Tensor, num_per_tokens: int, **_: Any) -> Cost:
    rows, width = x.shape
    return _cost(x.numel() * x.element_size(), rows, width, num_per_tokens)


def _declared(
    oracle: Callable[..., QuantTensor], cases: Cases, transposed: bool
) -> Callable[..., QuantTensor]:
    """The operator that casts a plain `x`."""

    @op(
        check=_check_cast,
        oracle=oracle,
        cost=_cost_cast,
        cases=cases,
        instead=layout.CAST_INSTEAD,
        outputs=("out", "out_sf"),
        name=oracle.__name__,
    )
    def cast(
        x: Tensor,
        fmt: str,  # noqa: ARG001
        num_per_tokens: int,
        round_sf: bool,
        out: Tensor | None = None,
        out_sf: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        out, out_sf = _outputs(out, out_sf, x, rows, width, num_per_tokens, transposed)
        if nonempty(out):
            _launch(x, out, out_sf, num_per_tokens, round_sf, transposed=transposed)
        return out, out_sf

    return cast


_cast = _declared(oracles.per_channel_cast, PER_CHANNEL_CAST, transposed=False)


@face(_cast, oracle=oracles.per_channel_cast)
def per_channel_cast(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantise with a scale for every 32 or 128 tokens of a channel.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, hidden]`, any row stride | bfloat16, float32 |
    | `fmt` | | `e4m3` |
    | `num_per_tokens` | | 32, 128: tokens of a scale |
    | `out` | as returned; filled and returned | |
    | returns data | `[num_tokens, hidden]` | float8_e4m3fn |
    | returns scales | `[ceil(num_tokens / num_per_tokens), hidden]` | float32 |

    `value = code * scale`, `code = encode(value * inv)`: with `a` the largest magnitude among the
    tokens of a scale (at least 1e-4), `scale = a / 448` and `inv = 448 / a`; `round_sf` takes the
    next power of two as scale. The last tokens may be fewer. Results are contiguous.

    A NaN becomes a NaN and does not count for the scale; an infinity counts as the largest float32
    and saturates.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> data, scales = per_channel_cast(torch.tensor([[1.0, -2.0], [7.0, 0.5]]), "e4m3", 32)
    >>> data.float().tolist(), (scales * 448).tolist()
    ([[64.0, -448.0], [448.0, 112.0]], [[7.0, 2.0]])
    """
    arguments = (x, fmt, num_per_tokens, round_sf)
    return _cast(*arguments, *layout.buffers(out))


# ---- gathered, of a plain or a quantised source --------------------------------------------------


def _check_fused(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,
    pos_to_token: Tensor | None,
) -> None:
    if num_per_channels is not None:
        checks.integer("num_per_channels", num_per_channels, 1)
        checks.one_of("num_per_channels", num_per_channels, (SOURCE_GROUP,))
    if x_sf is None:
        layout.check_plain(x)
    else:
        dims = ("num_tokens", "hidden")
        checks.tensor("x", x, dims, torch.float8_e4m3fn, unit_inner_stride=True)
        dims = ("num_tokens", "channel_blocks")
        blocks = (x.shape[0], ceil_div(x.shape[1], SOURCE_GROUP))
        checks.tensor("x_sf", x_sf, dims, torch.float32, shape=blocks)
        if num_per_channels is None:
            raise ValueError(f"num_per_channels must be {SOURCE_GROUP} for a quantised x, got None")
    layout.check_width("e4m3", x.shape[1])
    _check_flags(fmt, num_per_tokens, round_sf)
    if pos_to_token is not None:
        checks.tensor(
            "pos_to_token", pos_to_token, ("num_positions",), torch.int32, contiguous=True
        )


def _check_positions(
    x: Tensor,
    x_sf: Tensor | None,  # noqa: ARG001
    fmt: str,  # noqa: ARG001
    num_per_tokens: int,  # noqa: ARG001
    round_sf: bool,  # noqa: ARG001
    num_per_channels: int | None,  # noqa: ARG001
    pos_to_token: Tensor | None,
    **_: Any,
) -> None:
    """Negative positions are padding, the others name a row of `x`."""
    checks.in_range("pos_to_token", pos_to_token, -(2**31), x.shape[0] - 1)


def _cost_fused(
    x: Tensor | QuantTensor, num_per_tokens: int, pos_to_token: Tensor | None, **_: Any
) -> Cost:
    data, sf = layout.pair(x)
    rows = data.shape[0] if pos_to_token is None else pos_to_token.shape[0]
    read = data.numel() * data.element_size() + (0 if sf is None else 4 * sf.numel())
    read += 0 if pos_to_token is None else 4 * rows
    return _cost(read, rows, data.shape[1], num_per_tokens)


def _oracle_fused(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,
    pos_to_token: Tensor | None,
) -> QuantTensor:
    source = x if x_sf is None else (x, x_sf)
    if pos_to_token is not None:
        pos_to_token = pos_to_token.masked_fill(pos_to_token >= x.shape[0], -1)
    return oracles.per_channel_cast_fused(
        source, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token
    )


@op(
    check=_check_fused,
    oracle=_oracle_fused,
    cost=_cost_fused,
    cases=PER_CHANNEL_CAST_FUSED,
    instead=layout.CAST_INSTEAD,
    outputs=("out", "out_sf"),
    values=_check_positions,
    name="per_channel_cast_fused",
)
def _cast_fused(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,  # noqa: ARG001
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,  # noqa: ARG001
    pos_to_token: Tensor | None,
    out: Tensor | None = None,
    out_sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if pos_to_token is None else pos_to_token.shape[0]
    out, out_sf = _outputs(out, out_sf, x, rows, x.shape[1], num_per_tokens)
    if nonempty(out):
        if not nonempty(x):  # all is padding: of a row of zeros
            x = x.new_zeros((1, x.shape[1]))
            x_sf = None if x_sf is None else x_sf.new_zeros((1, x_sf.shape[1]))
        _launch(x, out, out_sf, num_per_tokens, round_sf, x_sf=x_sf, pos_to_token=pos_to_token)
    return out, out_sf


@face(_cast_fused, oracle=oracles.per_channel_cast_fused)
def per_channel_cast_fused(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantise gathered tokens, plain or quantised ones, as `per_channel_cast` does.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, hidden]`, any row stride | bfloat16, float32 |
    | or `x[0]` | `[num_tokens, hidden]`, any row stride | float8_e4m3fn |
    | with `x[1]` | `[num_tokens, ceil(hidden / 128)]`, any strides | float32 |
    | `fmt` | | `e4m3` |
    | `num_per_tokens` | | 32, 128: tokens of a scale |
    | `num_per_channels` | | 128 for a quantised `x`; ignored for a plain one |
    | `pos_to_token`, optional | `[num_positions]`, contiguous | int32 |
    | `out` | as returned; filled and returned | |
    | returns data | `[num_positions, hidden]` | float8_e4m3fn |
    | returns scales | `[ceil(num_positions / num_per_tokens), hidden]` | float32 |

    Row `i` of the result is that of `x[pos_to_token[i]]`. A position that is negative or not below
    `num_tokens` makes a row of zeros. Without `pos_to_token` the rows stay as they are. A quantised
    `x` is multiplied by its scales first, `(code * x[1]) * inv`. See `per_channel_cast` for scales,
    codes, NaN and infinity.

    Raises `TypeError` or `ValueError` with the argument's name, `x_sf` for `x[1]`; in the checked
    mode also for positions that are not below `num_tokens`. Not differentiable.

    >>> x, index = torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 0], dtype=torch.int32)
    >>> data, scales = per_channel_cast_fused(x, "e4m3", 32, pos_to_token=index)
    >>> data.float().tolist(), (scales * 448).tolist()
    ([[448.0], [0.0], [224.0]], [[2.0]])
    """
    data, sf = layout.pair(x)
    arguments = (data, sf, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token)
    return _cast_fused(*arguments, *layout.buffers(out))


# ---- transposed ----------------------------------------------------------------------------------

_cast_and_transpose = _declared(
    oracles.per_channel_cast_and_transpose, PER_CHANNEL_CAST_AND_TRANSPOSE, transposed=True
)


@face(_cast_and_transpose, oracle=oracles.per_channel_cast_and_transpose)
def per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """`per_channel_cast` with the data transposed, not the scales.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, hidden]`, any row stride | bfloat16, float32 |
    | `fmt` | | `e4m3` |
    | `num_per_tokens` | | 32, 128: tokens of a scale |
    | `out` | as returned; filled and returned | |
    | returns data | `[hidden, num_tokens]`, contiguous | float8_e4m3fn |
    | returns scales | `[ceil(num_tokens / num_per_tokens), hidden]` | float32 |

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable. Fastest where
    `num_tokens` is a multiple of 16 and `hidden` of 8.

    >>> x = torch.tensor([[1.0, -2.0], [7.0, 0.5]])
    >>> data, scales = per_channel_cast_and_transpose(x, "e4m3", 32)
    >>> data.float().tolist(), (scales * 448).tolist()
    ([[64.0, 448.0], [-448.0, 112.0]], [[7.0, 2.0]])
    """
    arguments = (x, fmt, num_per_tokens, round_sf)
    return _cast_and_transpose(*arguments, *layout.buffers(out))


# ---- of SwiGLU -----------------------------------------------------------------------------------


def _check_swiglu(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    without_transpose: bool,
    swiglu_clamp_value: float | None,
) -> None:
    layout.check_plain(x)
    layout.check_width("e4m3", x.shape[1])
    if x.shape[1] % 2:
        raise ValueError(
            f"x must have an even number of channels, gate and value, got {x.shape[1]}"
        )
    _check_flags(fmt, num_per_tokens, round_sf)
    checks.boolean("without_transpose", without_transpose)
    layout.check_swiglu_clamp(swiglu_clamp_value)


def _cost_swiglu(x: Tensor, num_per_tokens: int, **_: Any) -> Cost:
    return _cost(x.numel() * x.element_size(), x.shape[0], x.shape[1] // 2, num_per_tokens)


@op(
    check=_check_swiglu,
    oracle=oracles.swiglu_forward_and_per_channel_cast_and_transpose,
    cost=_cost_swiglu,
    cases=SWIGLU_AND_PER_CHANNEL_CAST,
    instead=layout.SWIGLU_INSTEAD,
    outputs=("out", "out_sf"),
    name="swiglu_forward_and_per_channel_cast_and_transpose",
)
def _swiglu_and_cast(
    x: Tensor,
    fmt: str,  # noqa: ARG001
    num_per_tokens: int,
    round_sf: bool,
    without_transpose: bool,
    swiglu_clamp_value: float | None,
    out: Tensor | None = None,
    out_sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape[0], x.shape[1] // 2
    transposed = not without_transpose
    out, out_sf = _outputs(out, out_sf, x, rows, width, num_per_tokens, transposed)
    if nonempty(out):
        clamped = swiglu_clamp_value is not None
        _launch(
            x, out, out_sf, num_per_tokens, round_sf, transposed=transposed,
            activation="clamped_swiglu" if clamped else "swiglu",
            clamp=math.inf if swiglu_clamp_value is None else swiglu_clamp_value,
        )  # fmt: skip
    return out, out_sf


@face(_swiglu_and_cast, oracle=oracles.swiglu_forward_and_per_channel_cast_and_transpose)
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """SwiGLU, rounded to bfloat16, then `per_channel_cast_and_transpose`.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, 2 * hidden]`: gate, value; any row stride | bfloat16, float32 |
    | `fmt` | | `e4m3` |
    | `num_per_tokens` | | 32, 128: tokens of a scale |
    | `without_transpose` | | True: data as `per_channel_cast` returns it |
    | `swiglu_clamp_value` | | at least 0, or None |
    | `out` | as returned; filled and returned | |
    | returns data | `[hidden, num_tokens]`, or `[num_tokens, hidden]` | float8_e4m3fn |
    | returns scales | `[ceil(num_tokens / num_per_tokens), hidden]` | float32 |

    With a clamp value `c` first `l = min(l, c)` for the gate and `r = min(max(r, -c), c)` for the
    value. The activation is `(l / (1 + exp(-l))) * r` in float32.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> x = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
    >>> data, scales = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32)
    >>> data.float().tolist(), (scales * 448).tolist()
    ([[448.0, 352.0]], [[2.1875]])
    """
    arguments = (x, fmt, num_per_tokens, round_sf, without_transpose, swiglu_clamp_value)
    return _swiglu_and_cast(*arguments, *layout.buffers(out))
