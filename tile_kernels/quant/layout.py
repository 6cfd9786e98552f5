"""What the declarations of all casts share: names of dtypes and formats, checks, results, costs."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.quant import formats
from tile_kernels.quant.scales import is_packed_along_tokens, num_blocks, unpack_along_tokens
from tile_kernels.quant.storage import (
    COLUMN,
    E4M3_COLUMN,
    E4M3_ROW,
    PACKED,
    PACKED_ROW,
    ROW,
    is_by_rows,
    is_packed,
    row_padding,
    scale_dtype,
)
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Out
from tile_kernels.runtime.operator import Operator
from tile_kernels.utils import align, ceil_div

PLAIN = (torch.bfloat16, torch.float32)
SOURCES = {
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "e2m1",
    torch.uint8: "e5m6",
}
FORMATS = {fmt.name: fmt for fmt in (formats.E4M3, formats.E2M1, formats.E5M6)}
OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What has a gradient where casts have none.
CAST_INSTEAD = "tile_kernels.quant.fake_cast, whose gradient passes straight through the rounding"
SWIGLU_INSTEAD = "tile_kernels.modeling.quant.swiglu_cast"


class ScaleOptions(Protocol):
    """The flags among the arguments of an operator with scales."""

    @property
    def use_tma_aligned_col_major_sf(self) -> bool: ...  # noqa: D102
    @property
    def round_sf(self) -> bool: ...  # noqa: D102
    @property
    def use_packed_ue8m0(self) -> bool: ...  # noqa: D102


def layout_of(a: ScaleOptions) -> str:
    """The name of the layout that the flags ask for."""
    if getattr(a, "use_e4m3_sf", False):
        return E4M3_COLUMN if a.use_tma_aligned_col_major_sf else E4M3_ROW
    if a.use_packed_ue8m0:
        return PACKED if a.use_tma_aligned_col_major_sf else PACKED_ROW
    return COLUMN if a.use_tma_aligned_col_major_sf else ROW


def _check_kinds(a: ScaleOptions) -> None:
    checks.boolean("use_tma_aligned_col_major_sf", a.use_tma_aligned_col_major_sf)
    checks.boolean("round_sf", a.round_sf)
    checks.boolean("use_packed_ue8m0", a.use_packed_ue8m0)


def check_flags(a: ScaleOptions, rounded: bool = False) -> None:
    """Raises if the flags ask for packed exponents of scales that are not powers of two.

    `rounded`: scales are powers of two even without `round_sf`.
    """
    _check_kinds(a)
    if a.use_packed_ue8m0 and not (a.round_sf or rounded):
        raise ValueError(
            "use_packed_ue8m0 needs round_sf=True, because packed scales are exponents (in rows; "
            "in columns with use_tma_aligned_col_major_sf), got round_sf=False"
        )


def check_row_major_flags(a: ScaleOptions) -> None:
    """Scales that are given come row by row, as float32."""
    _check_kinds(a)
    if a.use_tma_aligned_col_major_sf or a.use_packed_ue8m0:
        name = "use_packed_ue8m0" if a.use_packed_ue8m0 else "use_tma_aligned_col_major_sf"
        raise ValueError(f"{name} must be False: a given sf is row-major float32")


def check_plain(x: object) -> None:
    """`x` is bfloat16 or float32 `[num_tokens, hidden]` with neighbouring channels."""
    checks.tensor("x", x, ("num_tokens", "hidden"), PLAIN, unit_inner_stride=True)


def check_block(name: str, value: object) -> None:
    """`value` is the rows and the channels of a block."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        given = f"{len(value)} values" if isinstance(value, (tuple, list)) else checks.shown(value)
        raise TypeError(f"{name} must be two ints, (rows, channels), got {given}")
    for size in value:
        checks.integer(name, size, 1, checks.MOST_SIZE)


def check_width(fmt: str, width: int) -> None:
    """Rows of that many values have any, and can be packed."""
    per = {"e2m1": 2, "e5m6": 8}.get(fmt, 1)
    if width % per:
        raise ValueError(f"x must have a multiple of {per} channels for {fmt}, got {width}")
    if width == 0:
        raise ValueError("x must have at least one channel, got 0")


def check_e4m3(a: Any) -> None:
    """Scales in e4m3 are neither rounded nor packed; only they have a factor `global_sf`."""
    checks.boolean("use_e4m3_sf", a.use_e4m3_sf)
    if a.use_e4m3_sf and (a.round_sf or getattr(a, "use_packed_ue8m0", False)):
        raise ValueError("use_e4m3_sf cannot be combined with round_sf or use_packed_ue8m0")
    if a.global_sf is not None:
        if not a.use_e4m3_sf:
            raise ValueError("global_sf needs use_e4m3_sf")
        check_global_sf(a.global_sf)


def check_global_sf(global_sf: object) -> None:
    """A factor of all scales is a float32 with one element."""
    dims = ("one",) if isinstance(global_sf, Tensor) and global_sf.dim() else ()
    if not isinstance(global_sf, Tensor):
        given = checks.shown(global_sf)
        raise TypeError(f"global_sf must be a number that float32 holds, or a tensor, got {given}")
    checks.tensor("global_sf", global_sf, dims, torch.float32, shape=(1,) if dims else ())


def check_seed(seed: object) -> None:
    """A seed is an int64 with one element."""
    dims = ("one",) if isinstance(seed, Tensor) and seed.dim() else ()
    if not isinstance(seed, Tensor):
        given = checks.shown(seed)
        raise TypeError(f"seed must be an int that 64 bits hold, or a tensor, got {given}")
    checks.tensor("seed", seed, dims, torch.int64, shape=(1,) if dims else ())


def check_amax_min(amax_min: float, fmt: str) -> None:
    """A bound whose scale, and its inverse, are normal float32: neither 0 nor subnormal."""
    checks.number("amax_min", amax_min)
    least = FORMATS[fmt].max * 2.0**-126
    if not least <= amax_min <= 2.0**127:
        raise ValueError(f"amax_min must be in {least}..{2.0**127} for {fmt}, got {amax_min}")


def least_amax(fmt: Any, use_e4m3_sf: Any, amax_min: Any) -> Any:
    """The least amax of a cast: what was given, or the setting of `tile_kernels.config`.

    For scales in e4m3 at least what gives the least of them: a scale of 0 has no inverse.
    """
    use_e4m3_sf = checks.plain(use_e4m3_sf)
    known = isinstance(fmt, str) and isinstance(use_e4m3_sf, bool) and fmt in FORMATS
    if amax_min is None:
        amax_min = config.amax_min(fmt, use_e4m3_sf) if known else 1.0  # the checks refuse it
    amax_min = checks.plain(amax_min)
    if known and use_e4m3_sf and isinstance(amax_min, (int, float, torch.SymFloat)):
        least = formats.e4m3_amax_min(FORMATS[fmt])
        if FORMATS[fmt].max * 2.0**-126 <= amax_min < least:  # less is for the checks to refuse
            return least
    return amax_min


def as_scalar(value: Any, x: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor on the device of `x`; tensors and None as they are.

    What the dtype cannot hold stays as it is, for the checks to refuse.
    """
    value = checks.plain(value)
    kinds = (int,) if dtype == torch.int64 else (int, float)
    limit = 2**63 if dtype == torch.int64 else 2**127
    if type(value) not in kinds or not isinstance(x, Tensor) or not -limit <= value < limit:
        return value
    return torch.full((), value, dtype=dtype, device=x.device)


def flat_scalar(x: Any) -> Any:
    """The spec of an optional tensor with one element as `[1]`."""
    return x if x is None or x.dim() == 1 else x.view(1)


def check_source_scales(x: Tensor, x_sf: Tensor, block: Sequence[int], e4m3: bool = False) -> None:
    """The scales of a quantized `x` in blocks, in any layout; in e4m3 too if the operator can."""
    dtypes = (torch.float32, torch.int32, *([torch.float8_e4m3fn] if e4m3 else []))
    checks.tensor("x_sf", x_sf, ("row_blocks", "channel_blocks"), dtypes)
    rows, groups = num_blocks((x.shape[0], values_in(x)), block)
    if x_sf.dtype == torch.int32:
        groups = ceil_div(groups, 4)
    checks.tensor("x_sf", x_sf, ("row_blocks", "channel_blocks"), shape=(rows, groups))


def unpacked_along_tokens(data: Tensor, sf: Tensor, block: Any) -> Tensor:
    """Scales of blocks of one channel in float32, if they are packed along tokens."""
    sizes = block if isinstance(block, (tuple, list)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) for size in sizes) or sizes[1] != 1:
        return sf
    shape = (data.shape[0], values_in(data))
    if type(block[0]) is not int or block[0] < 1 or not is_packed_along_tokens(sf, shape, block):
        return sf
    return unpack_along_tokens(sf, num_blocks(shape, block)[0])


def check_swiglu_clamp(value: float | None) -> None:
    """The bound of SwiGLU's halves: None, or a number from 0 on."""
    if value is None:
        return
    checks.number("swiglu_clamp_value", value)
    if not value >= 0:
        raise ValueError(f"swiglu_clamp_value must be at least 0, or None, got {value}")


def swiglu_clamp(value: float | None) -> float:
    """The bound of SwiGLU's halves as kernels take it."""
    return math.inf if value is None else float(value)


def pair(x: Any) -> tuple[Any, Tensor | None]:
    """Data and scales of a quantized `x`; anything else and None, for the checks to refuse."""
    if isinstance(x, tuple) and len(x) == 2:
        data, scales = x
        if isinstance(data, Tensor) and isinstance(scales, Tensor):
            return data, scales
    return x, None


def check_plain_or_pair(x: object) -> None:
    """`x`, what `pair` left of an argument, is not a tuple of other things."""
    if isinstance(x, tuple):
        given = ", ".join(type(part).__name__ for part in x)
        raise TypeError(f"x must be a tensor, or a tuple of data and scales, got ({given})")


def check_pair(x: object, x_sf: Tensor | None) -> None:
    """`pair` found data and scales."""
    if x_sf is None:
        given = ", ".join(type(part).__name__ for part in (x if isinstance(x, tuple) else (x,)))
        raise TypeError(f"x must be a tuple of data and scales, two tensors, got ({given})")


def values_in(x: Tensor) -> int:
    """The channels of a row of `x`: a byte of int8 holds two, twelve of uint8 eight."""
    width = x.shape[1]
    if x.dtype == torch.int8:
        return 2 * width
    return width * 2 // 3 if x.dtype == torch.uint8 else width


def data_width(fmt: str, width: int) -> int:
    """The elements of a row of `width` channels in a format."""
    return {"e4m3": width, "e2m1": width // 2, "e5m6": width * 3 // 2}[fmt]


def data_out(fmt: str, rows: int, width: int) -> Out:
    """The data of a result of `rows x width` values."""
    return Out("out", (rows, data_width(fmt, width)), FORMATS[fmt].dtype)


def scale_out(name: str, rows: int, groups: int, layout: str) -> Out:
    """The scales of a result of `rows x groups` blocks.

    Kernels also write the padding of the columns, so that they get the buffer behind the result.
    """
    dtype = getattr(torch, scale_dtype(layout))
    if is_packed(layout):
        groups = ceil_div(groups, 4)
    if is_by_rows(layout):
        return Out(name, (rows, groups), dtype)
    padded = align(rows, row_padding(layout))
    return Out(name, (rows, groups), dtype, (1, padded), base=(groups, padded))


def cast_outs(
    a: ScaleOptions, fmt: str, shape: Sequence[int], block: Sequence[int]
) -> tuple[Out, Out]:
    """Data and scales of a result of that many values, in blocks."""
    scales = scale_out("out_sf", *num_blocks(shape, block), layout_of(a))
    return data_out(fmt, *shape), scales


def as_words(data: Any) -> Any:
    """The spec of data as kernels read it: e2m1 as unsigned bytes, e5m6 as 32-bit integers."""
    if data.dtype == torch.int8:
        return data.view(torch.uint8)
    return data.view(torch.int32) if data.dtype == torch.uint8 else data


# ---- the least work ------------------------------------------------------------------------------


def bytes_of(x: Tensor | QuantTensor) -> int:
    """The bytes of a tensor, or of data and scales."""
    parts = x if isinstance(x, tuple) else (x,)
    return sum(part.numel() * part.element_size() for part in parts)


def _scale_bytes(
    shape: Sequence[int], block: Sequence[int], packed: bool, e4m3: bool = False
) -> int:
    """The bytes of the scales of that many values in blocks, without padding."""
    rows, groups = num_blocks(shape, block)
    return rows * groups if e4m3 else 4 * rows * (ceil_div(groups, 4) if packed else groups)


def cast_cost(
    x: Tensor | QuantTensor,
    fmt: str,
    shape: Sequence[int],
    block: Sequence[int],
    packed: bool,
    e4m3: bool = False,
) -> Cost:
    """Reads `x`, writes data of `shape` values and their scales."""
    written = shape[0] * data_width(fmt, shape[1]) + _scale_bytes(shape, block, packed, e4m3)
    return Cost(bytes=bytes_of(x) + written)


def scales_cost(x: Tensor, block: Sequence[int], packed: bool, e4m3: bool = False) -> Cost:
    """Reads `x`, writes its scales."""
    return Cost(bytes=bytes_of(x) + _scale_bytes(x.shape, block, packed, e4m3))


def given_cost(x: Tensor, fmt: str, sf: Tensor, **_: Any) -> Cost:
    """Reads `x` and its scales, writes data."""
    return Cost(bytes=bytes_of((x, sf)) + x.shape[0] * data_width(fmt, x.shape[1]))


# ---- operators -----------------------------------------------------------------------------------


def _by_fields(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference of a plain or quantized `x`, with data and scales as two arguments."""
    return lambda x, x_sf, *rest: reference(x if x_sf is None else (x, x_sf), *rest)


def cast_operator(
    reference: Callable[..., Any],
    arguments: Any,
    cost: Callable[..., Cost],
    *,
    name: str = "",
    by_fields: Callable[..., Any] | None = None,
    instead: str = CAST_INSTEAD,
    **more: Any,
) -> Operator:
    """The operator with the name of its reference, with a buffer `out` or those of `cast_outs`.

    The rows of `x`, and of scales that are arguments, may change with the same launches.
    `by_fields` is the reference by the fields of `arguments`. If the operator has no gradient,
    `instead` names what has one.
    """
    if by_fields is None:
        by_fields = _by_fields(reference) if "x_sf" in arguments._fields else reference
    single = typing.get_type_hints(arguments.outputs)["return"] is Out
    more.setdefault("dynamic", {x: 1 for x in ("x", "x_sf", "sf") if x in arguments._fields})
    return Operator(
        f"quant.{name or reference.__name__}",
        arguments,
        reference=by_fields,
        cost=cost,
        out=("out",) if single else ("out", "out_sf"),
        instead=instead,
        **more,
    )
