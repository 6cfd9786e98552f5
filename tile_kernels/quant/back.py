"""From quantised data back to bfloat16 or float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.back import CAST_BACK, PER_TOKEN_CAST_BACK
from tile_kernels.quant.layout import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty, row_alignment
from tile_kernels.runtime.op import face, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import quant as oracles

E5M6 = "e5m6"

_CAST_ROWS_BACK = Kernel("tile_kernels.quant.kernels.back", "cast_rows_back")


def _check_back(
    x: Tensor, x_sf: Tensor, fmt: str, x_block_size: list[int], x_special_fmt: str | None = None
) -> None:
    checks.one_of("fmt", fmt, tuple(layout.OUT_DTYPES))
    checks.one_of("x_special_fmt", x_special_fmt, (None, E5M6))
    special = x_special_fmt is not None
    dtypes = torch.uint8 if special else (torch.float8_e4m3fn, torch.int8)
    checks.tensor("x", x, ("num_tokens", "hidden"), dtypes, unit_inner_stride=True)
    if special and (x.shape[1] % 12 or x.stride(0) % 4 or x.storage_offset() % 4):
        raise ValueError(
            "x must have rows of 12 bytes for 8 values of e5m6, at multiples of 4 bytes, got shape "
            f"{tuple(x.shape)} and strides {tuple(x.stride())}"
        )
    if x.shape[1] == 0:
        raise ValueError("x must have at least one channel, got 0")
    layout.check_block("x_block_size", x_block_size)
    layout.check_source_scales(x, x_sf, (x_block_size[0], x_block_size[1]))


def _cost(x: QuantTensor, fmt: str, **_: Any) -> Cost:
    data, sf = x
    written = data.shape[0] * layout.values_in(data) * layout.OUT_DTYPES[fmt].itemsize
    return Cost(bytes=data.numel() + 4 * sf.numel() + written)


def _oracle_back(
    x: Tensor, x_sf: Tensor, fmt: str, x_block_size: list[int], x_special_fmt: str | None = None
) -> Tensor:
    block = (x_block_size[0], x_block_size[1])
    return oracles.cast_back((x, x_sf), fmt, block, x_special_fmt)


def _run(x: Tensor, x_sf: Tensor, fmt: str, x_block_size: list[int], out: Tensor | None) -> Tensor:
    rows, width = x.shape[0], layout.values_in(x)
    out = output("out", out, x, (rows, width), layout.OUT_DTYPES[fmt])
    if nonempty(x):
        packed = x_sf.dtype == torch.int32
        # Scales of neighbouring channels that are neighbours themselves can be read together.
        together = not packed and x_sf.stride(1) == 1 and x_block_size[1] == 1
        problem = (
            layout.SOURCES[x.dtype], layout.SOURCES[out.dtype], rows, width, tuple(x_block_size),
            packed, row_alignment(x), alignment(out),
            row_alignment(x_sf) if together else 4,
        )  # fmt: skip
        _CAST_ROWS_BACK.launch(problem, layout.as_words(x), x_sf, out)
    return out


@op(
    check=_check_back,
    oracle=_oracle_back,
    cost=_cost,
    cases=CAST_BACK,
    instead=layout.CAST_INSTEAD,
    outputs=("out",),
    name="cast_back",
)
def _cast_back(
    x: Tensor,
    x_sf: Tensor,
    fmt: str,
    x_block_size: list[int],
    x_special_fmt: str | None = None,  # noqa: ARG001 - the dtype of x says it
    out: Tensor | None = None,
) -> Tensor:
    return _run(x, x_sf, fmt, x_block_size, out)


@face(_cast_back, oracle=oracles.cast_back, check=layout.check_pair)
def cast_back(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Quantised data and scales back to bfloat16 or float32.

    | argument | shape | dtype |
    |---|---|---|
    | `x`, data | `[num_tokens, hidden]`, any row stride | float8_e4m3fn |
    | or | `[num_tokens, hidden / 2]` | int8, two e2m1 each |
    | or, with `x_special_fmt="e5m6"` | `[num_tokens, 3 hidden / 2]` | uint8 |
    | `x`, scales | `[ceil(num_tokens / rows), ceil(hidden / channels)]`, any strides | float32 |
    | or | `[.., ceil(channel_blocks / 4)]`, four exponents each | int32 |
    | `fmt` | | `bf16`, `fp32` |
    | `x_block_size` | | rows and channels of a scale, any |
    | `out` | `[num_tokens, hidden]`; filled and returned | as returned |
    | returns | `[num_tokens, hidden]` | bfloat16, float32 |

    `code * scale` in float32, rounded once, then to bfloat16 if asked. Rows of e5m6 must start at
    multiples of 4 bytes.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> data = torch.tensor([[1.0, -2.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
    >>> cast_back((data, torch.tensor([[0.5, 2.0]])), "fp32", (1, 2))
    tensor([[ 0.5000, -1.0000,  6.0000,  8.0000]])
    """
    data, sf = x
    return _cast_back(data, sf, fmt, x_block_size, x_special_fmt, out)  # type: ignore[arg-type]


def cast_back_e5m6(
    x: QuantTensor, fmt: str, x_block_size: tuple[int, int], out: Tensor | None = None
) -> Tensor:
    """`cast_back` of e5m6 data.

    >>> data = torch.zeros(1, 12, dtype=torch.uint8)
    >>> cast_back_e5m6((data, torch.ones(1, 1)), "fp32", (1, 8)).tolist()
    [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    """
    return cast_back(x, fmt, x_block_size, E5M6, out)


# ---- blocks of one row --------------------------------------------------------------------------


def _check_tokens(
    x: Tensor, x_sf: Tensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> None:
    checks.integer("num_per_channels", num_per_channels, 1)
    _check_back(x, x_sf, fmt, [1, num_per_channels], x_special_fmt)


def _oracle_tokens(
    x: Tensor, x_sf: Tensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> Tensor:
    return oracles.per_token_cast_back((x, x_sf), fmt, num_per_channels, x_special_fmt)


@op(
    check=_check_tokens,
    oracle=_oracle_tokens,
    cost=_cost,
    cases=PER_TOKEN_CAST_BACK,
    instead=layout.CAST_INSTEAD,
    outputs=("out",),
    name="per_token_cast_back",
)
def _per_token_cast_back(
    x: Tensor,
    x_sf: Tensor,
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,  # noqa: ARG001 - the dtype of x says it
    out: Tensor | None = None,
) -> Tensor:
    return _run(x, x_sf, fmt, [1, num_per_channels], out)


@face(_per_token_cast_back, oracle=oracles.per_token_cast_back, check=layout.check_pair)
def per_token_cast_back(
    x: QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`cast_back` of data with a scale for every `num_per_channels` channels of a row.

    Arguments and result as there.

    >>> data = torch.tensor([[1.0, -2.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
    >>> per_token_cast_back((data, torch.tensor([[0.5, 2.0]])), "fp32", 2)
    tensor([[ 0.5000, -1.0000,  6.0000,  8.0000]])
    """
    data, sf = x
    return _per_token_cast_back(data, sf, fmt, num_per_channels, x_special_fmt, out)
