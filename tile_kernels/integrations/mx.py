"""Quantized tensors as torchao and PyTorch's scaled products take them: OCP's MX formats, NVFP4.

    data, scales = mx.to_mx(x, "e4m3")                # torch.float8_e8m0fnu, [rows, groups]
    data, scales, global_sf = mx.to_nvfp4(x)          # torch.float4_e2m1fn_x2, float8_e4m3fn
    blocked = mx.to_blocked(scales)                   # as SwizzleType.SWIZZLE_32_4_4 wants them
    y = torch.nn.functional.scaled_mm(**mx.functional_scaled_mm_arguments(a, b))
    y = torch._scaled_mm(**mx.scaled_mm_arguments(a, b))    # the older operator

`quant.per_token_cast(x, "e4m3", 32, round_sf=True)` is MXFP8 and the same with `"e2m1"` MXFP4; with
packed scales (`use_packed_ue8m0`) too. What differs is how scales are stored: see `mx_operand`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from tile_kernels import quant
from tile_kernels.quant import formats
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.utils import align, ceil_div

__all__ = [
    "from_blocked",
    "from_mx",
    "from_nvfp4",
    "functional_scaled_mm_arguments",
    "mx_operand",
    "mx_scales",
    "scaled_grouped_mm_arguments",
    "scaled_mm_arguments",
    "to_blocked",
    "to_mx",
    "to_nvfp4",
]

_WORD = 4  # exponents in an int32
_MX_GROUP, _NVFP4_GROUP, _BLOCK = 32, 16, 128  # channels of a scale
_MOST_E2M1, _MOST_E4M3 = 6.0, 448.0
_LEAST_SCALE = 2.0**-126  # of MX, as a normal number of float32
# A tile of the blocked layout: 128 rows of 4 scales in 512 bytes.
TILE_ROWS, TILE_COLUMNS = 128, 4
_PACKED = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
_DATA = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_VALUES = (torch.bfloat16, torch.float32)
_OUT = {"bf16": torch.bfloat16, "fp32": torch.float32}
# How the operands of a product may be scaled, the first that fits.
_PAIRS = (
    ("row", "row"), ("1x128", "1x128"), ("1x128", "128x128"), ("mx", "mx"), ("nvfp4", "nvfp4"),
)  # fmt: skip
_RECIPES = {
    "row": ScalingType.RowWise,
    "1x128": ScalingType.BlockWise1x128,
    "128x128": ScalingType.BlockWise128x128,
    "mx": ScalingType.BlockWise1x32,
    "nvfp4": ScalingType.BlockWise1x16,
}

Scaled = QuantTensor | tuple[Tensor, Tensor, Tensor]


def mx_scales(sf: Tensor, num_groups: int | None = None) -> Tensor:
    """Scales as `torch.float8_e8m0fnu`: an exponent in each byte.

    Args:
        sf: `[rows, groups]`, float32: powers of two, as casts with `round_sf=True` return; or
            `[rows, ceil(groups / 4)]`, int32: the packed exponents of `use_packed_ue8m0=True`.
        num_groups: With packed scales: how many groups a row has; None: all that the words hold.

    Returns:
        `[rows, groups]`, float8_e8m0fnu, contiguous. A scale of 0 or below 2^-127 becomes 2^-127.

    Raises:
        TypeError: If the dtype is another one.
        ValueError: If the shape is not that of rows, or `num_groups` does not fit.

    Example:
        >>> mx_scales(torch.tensor([[0.25, 1.0]])).float()
        tensor([[0.2500, 1.0000]])
    """
    with checks.named("mx_scales"):
        checks.tensor("sf", sf, ("rows", "groups"), (torch.float32, torch.int32))
        if sf.dtype == torch.int32:
            most = sf.shape[1] * _WORD
            groups = most if num_groups is None else checks.integer("num_groups", num_groups, 0)
            if ceil_div(groups, _WORD) != sf.shape[1]:
                raise ValueError(f"num_groups must be in {max(0, most - 3)}..{most}, got {groups}")
            exponents = formats.words_to_bytes(sf)[:, :groups].contiguous()
            return exponents.view(torch.float8_e8m0fnu)
        if num_groups is not None and num_groups != sf.shape[1]:
            raise ValueError(f"num_groups must be {sf.shape[1]}, got {num_groups}")
    bits = sf.contiguous().view(torch.int32) >> 23  # of a power of two: its exponent alone
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)


def mx_operand(data: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scales of a cast with groups of 32 channels, in PyTorch's dtypes.

    Args:
        data: `[rows, channels]`, e4m3 or e5m2; or `[rows, channels / 2]`, int8 or uint8: packed
            e2m1.
        sf: The scales of the cast, as of `mx_scales`.

    Returns:
        `(data, scales)`: `data` with the same memory, packed e2m1 as `torch.float4_e2m1fn_x2`;
        `scales` `[rows, channels / 32]`, float8_e8m0fnu.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If there are not 32 channels for a scale.
    """
    with checks.named("mx_operand"):
        checks.tensor("data", data, ("rows", "bytes"), _DATA)
        packed = data.dtype in (torch.int8, torch.uint8)
        channels = data.shape[1] * (2 if packed else 1)
        if channels % 32:
            raise ValueError(f"data must have a multiple of 32 channels, got {channels}")
        scales = mx_scales(sf, channels // 32)
        if scales.shape[0] != data.shape[0]:
            raise ValueError(f"sf must have {data.shape[0]} rows like data, got {scales.shape[0]}")
    return (data.view(torch.float4_e2m1fn_x2) if packed else data), scales


def to_blocked(scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Scales in the order in which tensor cores of Blackwell read them, as cuBLAS takes them.

    Without `offsets` this is `quant.blocked_scales`: rows and columns are padded with zero bytes to
    tiles of 128 x 4, which follow each other row by row. With `offsets` the rows of each group are
    padded by themselves, as grouped products take them. The result then has room for any sizes of
    groups, so that the host does not wait: the last rows may be zero.

    Args:
        scales: `[rows, columns]`, any dtype of one byte.
        offsets: `[groups]`, int32: one past the last row of each group, ascending; or None.

    Returns:
        `[512 * ceil(rows / 128) * ceil(columns / 4)]`, the same dtype. With `offsets`
        `[align(rows + 127 * groups, 128), align(columns, 4)]`, in the same order.

    Raises:
        TypeError: If an element is not one byte, or `offsets` is not int32.
        ValueError: If the shape is not that of rows.

    Example:
        >>> to_blocked(torch.ones(2, 2, dtype=torch.uint8)).nonzero().flatten().tolist()
        [0, 1, 16, 17]
        >>> ends = torch.tensor([1, 2]).int()
        >>> to_blocked(torch.ones(2, 1, dtype=torch.uint8), ends).flatten().nonzero().tolist()
        [[0], [512]]
    """
    with checks.named("to_blocked"):
        checks.tensor("scales", scales, ("rows", "columns"))
        if scales.element_size() != 1:
            raise TypeError(f"scales must have one byte each, got {scales.dtype}")
        if offsets is not None:
            checks.tensor("offsets", offsets, ("groups",), torch.int32)
    if offsets is None:
        return quant.blocked_scales(scales)
    rows, columns = scales.shape
    ends = offsets.long().clamp(0, rows)
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    sizes = (ends - starts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    shift = sizes.cumsum(0) - sizes - starts  # from a row to its place, by group
    number = torch.arange(rows, device=scales.device)
    group = torch.searchsorted(ends, number, right=True)
    bound = align(rows + (TILE_ROWS - 1) * len(offsets), TILE_ROWS)
    place = number + torch.nn.functional.pad(shift, (0, 1))[group]
    place = torch.where(group < len(offsets), place, bound)  # behind the last group
    padded = scales.new_zeros(bound + 1, columns, dtype=torch.uint8)
    padded[place] = scales.view(torch.uint8)
    whole = quant.blocked_scales(padded[:bound]).view(bound, align(columns, TILE_COLUMNS))
    return whole.view(scales.dtype)


@checks.named_errors
def from_blocked(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `to_blocked`.

    Args:
        blocked: What `to_blocked` returned.
        rows: Of the scales before.
        columns: Of the scales before.

    Returns:
        `[rows, columns]`, the same dtype, contiguous.

    Raises:
        TypeError: If an element is not one byte.
        ValueError: If the number of bytes is not that of the shape.
    """
    if not isinstance(blocked, Tensor) or blocked.element_size() != 1:
        given = blocked.dtype if isinstance(blocked, Tensor) else type(blocked).__name__
        raise TypeError(f"blocked must be a tensor with elements of one byte, got {given}")
    checks.integer("rows", rows, 0)
    checks.integer("columns", columns, 0)
    row_tiles, column_tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    expected = row_tiles * column_tiles * TILE_ROWS * TILE_COLUMNS
    if blocked.numel() != expected:
        raise ValueError(f"blocked must have {expected} bytes, got {blocked.numel()}")
    tiles = (
        blocked.contiguous().view(torch.uint8).view(row_tiles, column_tiles, 32, 4, TILE_COLUMNS)
    )
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    return whole[:rows, :columns].contiguous().view(blocked.dtype)


# ---- casts --------------------------------------------------------------------------------------


def to_mx(x: Tensor, fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    """Quantizes rows in groups of 32 channels with powers of two: MXFP8 or MXFP4.

    A scale is the least power of two, from `2**-126` on, with which the largest value of its group
    does not exceed the format's. Where that is not the limit, the bits are those of torchao's
    `to_mx` with `ScaleCalculationMode.RCEIL`.

    Args:
        x: `[rows, channels]`, bfloat16 or float32; a multiple of 32 channels.
        fmt: `"e4m3"` or `"e2m1"`.

    Returns:
        `(data, scales)`: `[rows, channels]` float8_e4m3fn, or `[rows, channels / 2]`
        float4_e2m1fn_x2; `[rows, channels / 32]` float8_e8m0fnu.

    Raises:
        TypeError: If the dtype is another one.
        ValueError: If the shape or the format is another one.

    Example:
        >>> data, scales = to_mx(torch.full((1, 32), 3.0))
        >>> data[0, 0].item(), scales.float().item()
        (384.0, 0.0078125)
    """
    with checks.named("to_mx"):
        checks.one_of("fmt", fmt, ("e4m3", "e2m1"))
        _check_rows(x, _MX_GROUP)
    most = _MOST_E4M3 if fmt == "e4m3" else _MOST_E2M1
    pair = quant.per_token_cast(x, fmt, _MX_GROUP, round_sf=True, amax_min=most * _LEAST_SCALE)
    return mx_operand(*pair)


def _check_rows(x: Tensor, group: int) -> None:
    checks.tensor("x", x, ("rows", "channels"), _VALUES)
    if x.shape[1] % group:
        raise ValueError(f"x must have a multiple of {group} channels, got {x.shape[1]}")


def _codes(data: Tensor) -> Tensor:
    """Packed e2m1 as the operators take it."""
    return data.view(torch.int8) if data.dtype in _PACKED else data


def from_mx(data: Tensor, scales: Tensor, fmt: str = "bf16") -> Tensor:
    """The values of MXFP8 or MXFP4: `quant.per_token_cast_back`.

    Args:
        data: `[rows, channels]` float8_e4m3fn, or packed `[rows, channels / 2]`, as of `to_mx`.
        scales: `[rows, channels / 32]`, float8_e8m0fnu.
        fmt: `"bf16"` or `"fp32"`.

    Returns:
        `[rows, channels]`, bfloat16 or float32.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If a shape or the format is another one.

    Example:
        >>> from_mx(*to_mx(torch.full((1, 32), 3.0), "e2m1"))[0, 0].item()
        3.0
    """
    with checks.named("from_mx"):
        checks.one_of("fmt", fmt, tuple(_OUT))
        checks.tensor("data", data, ("rows", "bytes"), (torch.float8_e4m3fn, *_PACKED))
        checks.tensor("scales", scales, ("rows", "groups"), torch.float8_e8m0fnu)
    return quant.per_token_cast_back((_codes(data), scales.float()), fmt, _MX_GROUP)


def to_nvfp4(x: Tensor, global_sf: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes rows to e2m1 in groups of 16 channels, with scales in e4m3 and one of all: NVFP4.

    A value is `code * scale * global_sf`.

    Args:
        x: `[rows, channels]`, bfloat16 or float32; a multiple of 16 channels.
        global_sf: The scale of all: a float32 with one element, or a number. None: the largest
            magnitude over 6 * 448, so that no scale exceeds 448; 1 if `x` is all zero. As in casts,
            NaN counts as 0 for it, and infinity as the largest finite number.

    Returns:
        `(data, scales, global_sf)`: `[rows, channels / 2]` float4_e2m1fn_x2; `[rows, channels /
        16]` float8_e4m3fn; float32 with one element.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If a shape is another one.

    Example:
        >>> data, scales, global_sf = to_nvfp4(torch.full((1, 16), 2688.0))
        >>> data.dtype, scales.float().item(), global_sf.item()
        (torch.float4_e2m1fn_x2, 448.0, 1.0)
    """
    with checks.named("to_nvfp4"):
        _check_rows(x, _NVFP4_GROUP)
    if global_sf is None:
        magnitudes = x.abs().nan_to_num(nan=0.0)
        most = magnitudes.amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        global_sf = torch.where(most > 0, most / (_MOST_E2M1 * _MOST_E4M3), 1.0)
    elif not isinstance(global_sf, Tensor):
        value = checks.finite("global_sf", global_sf)
        global_sf = torch.full((), value, dtype=torch.float32, device=x.device)
    data, scales = quant.per_token_cast(
        x, "e2m1", _NVFP4_GROUP, use_e4m3_sf=True, global_sf=global_sf
    )
    return data.view(torch.float4_e2m1fn_x2), scales, global_sf


def from_nvfp4(
    data: Tensor, scales: Tensor, global_sf: Tensor | float = 1.0, fmt: str = "bf16"
) -> Tensor:
    """The values of NVFP4: `quant.per_token_cast_back`.

    Args:
        data: `[rows, channels / 2]`, float4_e2m1fn_x2, int8 or uint8.
        scales: `[rows, channels / 16]`, float8_e4m3fn.
        global_sf: The scale of all.
        fmt: `"bf16"` or `"fp32"`.

    Returns:
        `[rows, channels]`, bfloat16 or float32.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If a shape or the format is another one.

    Example:
        >>> from_nvfp4(*to_nvfp4(torch.full((1, 16), 3.0)))[0, 0].item()
        3.0
    """
    with checks.named("from_nvfp4"):
        checks.one_of("fmt", fmt, tuple(_OUT))
        checks.tensor("data", data, ("rows", "bytes"), _PACKED)
        checks.tensor("scales", scales, ("rows", "groups"), torch.float8_e4m3fn)
    return quant.per_token_cast_back((_codes(data), scales), fmt, _NVFP4_GROUP, global_sf=global_sf)


# ---- products -----------------------------------------------------------------------------------


def _kinds(name: str, data: Tensor, sf: Tensor) -> list[str]:
    """How an operand may be scaled: up to 128 channels or one row fit several kinds.

    Raises for what the products do not take.
    """
    rows, columns = data.shape
    channels = columns * (2 if data.dtype in _PACKED else 1)
    given = tuple(sf.shape)
    kinds: dict[str, tuple[torch.dtype, tuple[int, int]]] = {
        "row": (torch.float32, (rows, 1)),
        "1x128": (torch.float32, (rows, ceil_div(channels, _BLOCK))),
        "128x128": (torch.float32, (ceil_div(rows, _BLOCK), ceil_div(channels, _BLOCK))),
        "mx": (torch.float8_e8m0fnu, (rows, ceil_div(channels, _MX_GROUP))),
        "nvfp4": (torch.float8_e4m3fn, (rows, ceil_div(channels, _NVFP4_GROUP))),
    }
    fitting = [kind for kind, fits in kinds.items() if (sf.dtype, given) == fits]
    if fitting:
        return fitting
    wanted = ", ".join(f"{list(shape)} {dtype}" for dtype, shape in kinds.values())
    raise ValueError(f"the scales of {name} must be one of {wanted}, got {list(given)} {sf.dtype}")


def _operand(name: str, pair: QuantTensor) -> tuple[Tensor, Tensor, list[str]]:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise TypeError(f"{name} must be a tuple of data and scales, got {type(pair).__name__}")
    data, sf = pair
    checks.tensor(f"{name}'s data", data, ("rows", "K"), (torch.float8_e4m3fn, *_PACKED))
    checks.tensor(f"{name}'s scales", sf, ("rows", "groups"))
    if data.dtype in _PACKED:
        data = data.view(torch.float4_e2m1fn_x2)
    return data.contiguous(), sf, _kinds(name, data, sf)


def _by_columns(sf: Tensor, length: int) -> Tensor:
    """`[rows, groups]` with strides `(1, length)`; rows beyond the last ones are not read."""
    rows, groups = sf.shape
    if sf.stride() == (1, length):
        return sf
    out = sf.new_zeros(groups, length).t()
    out[:rows].copy_(sf)
    return out[:rows]


def _of_blocks(sf: Tensor) -> Tensor:
    """Scales `[N / 128, K / 128]` as `[align(K / 128, 4), N / 128]` with strides `(1, align(..))`.

    cuBLAS reads columns that are 16 bytes apart at least.
    """
    groups = sf.shape[1]
    out = sf.new_zeros(sf.shape[0], align(groups, 4))
    out[:, :groups].copy_(sf)
    return out.t()


def _pair_of_kinds(a: Tensor, a_kinds: list[str], b: Tensor, b_kinds: list[str]) -> tuple[str, str]:
    """How both operands are scaled; raises if they do not fit."""
    if a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        raise ValueError(
            f"b must have rows of {a.shape[1]} {a.dtype} like a, got {b.shape[1]} {b.dtype}"
        )
    if a_kinds == ["128x128"]:
        raise ValueError("a must have scales of rows or of groups of channels, got 128x128")
    for pair in _PAIRS:
        if pair[0] in a_kinds and pair[1] in b_kinds:
            return pair
    raise ValueError(f"b must have scales of the kind {a_kinds[0]} like a, got {b_kinds[0]}")


def _with_global(name: str, given: Scaled) -> tuple[QuantTensor, Tensor | None]:
    """Data and scales, and the scale of all of NVFP4 if there is one."""
    if isinstance(given, tuple) and len(given) == 3:
        data, sf, global_sf = given
        flat = global_sf.reshape(-1) if isinstance(global_sf, Tensor) else global_sf
        checks.tensor(f"{name}'s scale of all", flat, ("1",), torch.float32, shape=(1,))
        return (data, sf), flat
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(
            f"{name} must be a tuple of data, scales and, of NVFP4, a scale of all, got "
            f"{type(given).__name__}"
        )
    return given, None


def scaled_mm_arguments(
    a: QuantTensor, b: QuantTensor, out_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The arguments of `torch._scaled_mm` for the product `a @ b.T` of quantized matrices.

    | scales of | `a` | `b` |
    |---|---|---|
    | rows: `per_token_cast(x, "e4m3", K)` | `[M, 1]` float32 | `[N, 1]` float32 |
    | groups of 128: `per_token_cast(x, "e4m3", 128)` | `[M, K / 128]` float32 | `[N, K / 128]` |
    | blocks: `per_block_cast(x, "e4m3", (128, 128))` | | `[N / 128, K / 128]` float32 |
    | MX: `to_mx` | `[M, K / 32]` float8_e8m0fnu | `[N, K / 32]` |
    | NVFP4: `to_nvfp4` | `[M, K / 16]` float8_e4m3fn | `[N, K / 16]` |

    Scales have the layout that the product reads. The product of NVFP4 takes no global scales:
    multiply its result by both, or use `functional_scaled_mm_arguments`. PyTorch has the product
    with scales of rows on CPUs (from 2.12 on), those with groups and blocks of 128 on Hopper, and
    those of MX and NVFP4 on Blackwell.

    With scales of blocks `K` must be a multiple of 512: cuBLAS reads their columns a multiple of
    four numbers apart, and this operator takes them exactly `K / 128` apart.

    Args:
        a: `(data, scales)`: `[M, K]` float8_e4m3fn, or packed e2m1, and one of the above.
        b: `(data, scales)`: `[N, K]`, and one of the above.
        out_dtype: Of the result.

    Returns:
        A dictionary: `torch._scaled_mm(**arguments)` is the product, `[M, N]`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If shapes or kinds of scales do not fit.

    Example:
        >>> a, b = (quant.per_token_cast(torch.ones(16, 32), "e4m3", 32) for _ in range(2))
        >>> arguments = scaled_mm_arguments(a, b)  # for torch._scaled_mm(**arguments)
        >>> arguments["mat2"].shape, arguments["scale_b"].shape
        (torch.Size([32, 16]), torch.Size([1, 16]))
    """
    with checks.named("scaled_mm_arguments"):
        a_data, a_sf, a_kinds = _operand("a", a)
        b_data, b_sf, b_kinds = _operand("b", b)
        a_kind, b_kind = _pair_of_kinds(a_data, a_kinds, b_data, b_kinds)
        if b_kind == "128x128" and b_sf.shape[0] > 1 and b_sf.shape[1] % 4:
            raise ValueError(
                "K must be a multiple of 512 with scales of blocks, unlike for "
                f"functional_scaled_mm_arguments, got {a_data.shape[1]}"
            )
    if a_kind in ("mx", "nvfp4"):
        scales = to_blocked(a_sf), to_blocked(b_sf)
    elif a_kind == "row":
        scales = a_sf.contiguous(), b_sf.contiguous().view(1, -1)
    else:
        of_b = b_sf
        if b_kind == "128x128":  # columns of it are the rows of the product's operand
            of_b = b_sf.contiguous().t()
        else:
            of_b = _by_columns(b_sf, b_sf.shape[0]).t()
        scales = _by_columns(a_sf, a_sf.shape[0]), of_b
    return {
        "input": a_data, "mat2": b_data.t(), "scale_a": scales[0], "scale_b": scales[1],
        "out_dtype": out_dtype,
    }  # fmt: skip


def functional_scaled_mm_arguments(
    a: Scaled, b: Scaled, out_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The arguments of `torch.nn.functional.scaled_mm` for `a @ b.T` of quantized matrices.

    That function is told how operands are scaled, and takes both scales of NVFP4. It exists since
    PyTorch 2.10.

    Args:
        a: As for `scaled_mm_arguments`; of NVFP4 also `(data, scales, global_sf)`, as `to_nvfp4`
            returns.
        b: As for `scaled_mm_arguments`, in three parts if `a` has three.
        out_dtype: Of the result.

    Returns:
        A dictionary: `torch.nn.functional.scaled_mm(**arguments)` is the product, `[M, N]`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If shapes or kinds of scales do not fit.

    Example:
        >>> a, b = (quant.per_token_cast(torch.ones(16, 32), "e4m3", 32) for _ in range(2))
        >>> arguments = functional_scaled_mm_arguments(a, b)
        >>> arguments["mat_b"].shape, [kind.name for kind in arguments["scale_recipe_b"]]
        (torch.Size([32, 16]), ['RowWise'])
    """
    with checks.named("functional_scaled_mm_arguments"):
        (a_pair, a_global), (b_pair, b_global) = _with_global("a", a), _with_global("b", b)
        a_data, a_sf, a_kinds = _operand("a", a_pair)
        b_data, b_sf, b_kinds = _operand("b", b_pair)
        a_kind, b_kind = _pair_of_kinds(a_data, a_kinds, b_data, b_kinds)
        if (a_global is None) != (b_global is None):
            raise ValueError("a and b must both have a scale of all, or neither")
        for name, kind, global_sf in (("a", a_kind, a_global), ("b", b_kind, b_global)):
            if global_sf is not None and kind != "nvfp4":
                raise ValueError(f"{name} must be NVFP4 to have a scale of all, got {kind}")
    of_a, of_b = _recipe(a_sf, a_kind, a_global), _recipe(b_sf, b_kind, b_global)
    if b_kind == "row":
        of_b[0][0] = of_b[0][0].view(1, -1)
    return {
        "mat_a": a_data, "mat_b": b_data.t(), "output_dtype": out_dtype,
        "scale_a": of_a[0], "scale_recipe_a": of_a[1], "swizzle_a": of_a[2],
        "scale_b": of_b[0], "scale_recipe_b": of_b[1], "swizzle_b": of_b[2],
    }  # fmt: skip


def _recipe(
    sf: Tensor, kind: str, global_sf: Tensor | None
) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    """The scales of an operand by rows, in PyTorch's layout; what they are; their swizzle."""
    swizzle = SwizzleType.NO_SWIZZLE
    if kind in ("mx", "nvfp4"):
        scales, swizzle = to_blocked(sf), SwizzleType.SWIZZLE_32_4_4
    elif kind == "1x128":
        scales = _by_columns(sf, sf.shape[0])
    else:
        scales = sf.contiguous() if kind == "row" else _of_blocks(sf)
    if global_sf is None:
        return [scales], [_RECIPES[kind]], [swizzle]
    kinds = [_RECIPES[kind], ScalingType.TensorWise]
    return [scales, global_sf], kinds, [swizzle, SwizzleType.NO_SWIZZLE]


def scaled_grouped_mm_arguments(
    a: QuantTensor, b: QuantTensor, offsets: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The arguments of `torch._scaled_grouped_mm`: rows of `a` by group times `b[group].T`.

    Args:
        a: `(data, scales)`: `[M, K]` float8_e4m3fn, and `[M, 1]` float32 (for a Hopper) or `[M, K /
            32]` float8_e8m0fnu (for a Blackwell).
        b: `(data, scales)`: `[E, N, K]`, and `[E, N, 1]` or `[E, N, K / 32]`, of the same kind.
        offsets: `[E]`, int32: one past the last row of each group.
        out_dtype: Of the result: bfloat16.

    Returns:
        A dictionary: `torch._scaled_grouped_mm(**arguments)` is the product, `[M, N]`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If shapes or kinds of scales do not fit.
    """
    with checks.named("scaled_grouped_mm_arguments"):
        a_data, a_sf, a_kinds = _operand("a", a)
        if not (isinstance(b, tuple) and len(b) == 2):
            raise TypeError(f"b must be a tuple of data and scales, got {type(b).__name__}")
        b_data, b_sf = b
        groups = ("E", "N", "K")
        checks.tensor(
            "b's data", b_data, groups, torch.float8_e4m3fn, shape=(None, None, a_data.shape[1])
        )
        checks.tensor("b's scales", b_sf, groups, shape=(*b_data.shape[:2], None))
        checks.tensor("offsets", offsets, ("E",), torch.int32, shape=(b_data.shape[0],))
        b_kinds = _kinds("b", b_data.flatten(0, 1), b_sf.flatten(0, 1))
        common = [kind for kind in ("row", "mx") if kind in a_kinds and kind in b_kinds]
        if a_data.dtype != torch.float8_e4m3fn or not common:
            raise ValueError(
                "a and b must be e4m3 with scales of rows or MX both, got "
                f"{a_kinds[0]} and {b_kinds[0]}"
            )
    if common == ["row"]:
        scales = a_sf.reshape(-1).contiguous(), b_sf.squeeze(-1).contiguous()
    else:
        each = torch.stack([to_blocked(one) for one in b_sf])
        scales = to_blocked(a_sf, offsets), each
    return {
        "input": a_data, "mat2": b_data.contiguous().transpose(-2, -1), "scale_a": scales[0],
        "scale_b": scales[1], "offs": offsets, "out_dtype": out_dtype,
    }  # fmt: skip
