"""What arguments of the products are: pairs of data and scales, recipes, layouts of data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.runtime import checks
from tile_kernels.utils import ceil_div

Operand = tuple[Tensor, Tensor]
Recipe = tuple[int, int, int]

BY_BLOCK: Recipe = (1, BLOCK, BLOCK)
BY_ROW: Recipe = (1, 1, BLOCK)
TMA_BYTES = 16
_NO_OPTIONS = (None,) * 4


# ---- arguments of public functions --------------------------------------------------------------


def check_pair(name: str, value: Any) -> None:
    """`value` is data with its scales."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        kind = f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(
            f"{name} must be a pair (data, scales), as tile_kernels.quant.per_token_cast returns "
            f"it, got {kind}"
        )
    for part in value:
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} must be a pair of tensors, got {type(part).__name__} in it")


def are_pairs(a: Any, b: Any) -> bool:
    """Whether both are tuples of two; the checks of an operator find what is not a tensor."""
    return type(a) is tuple and type(b) is tuple and len(a) == 2 and len(b) == 2


def check_recipe(
    recipe: Any, recipe_a: Any, recipe_b: Any, allowed: Sequence[Recipe] = (BY_BLOCK, BY_ROW)
) -> None:
    """The recipe, whole or by operand, is one that a kernel has."""
    if recipe is not None and not _is_one_of(recipe, allowed):
        listed = " or ".join(map(str, allowed))
        raise ValueError(f"recipe must be {listed}, got {checks.shown(recipe)}")
    if recipe_a is not None and not _is_one_of(recipe_a, [(1, BLOCK)]):
        raise ValueError(f"recipe_a must be (1, {BLOCK}), got {checks.shown(recipe_a)}")
    rows = {(chosen[1], BLOCK) for chosen in allowed}
    if recipe_b is not None and not _is_one_of(recipe_b, rows):
        listed = " or ".join(map(str, sorted(rows)))
        raise ValueError(f"recipe_b must be {listed}, got {checks.shown(recipe_b)}")


def _is_one_of(sizes: Any, allowed: Collection[tuple[int, ...]]) -> bool:
    """Whether `sizes` are ints, and one of these; 128.0 and True are not ints."""
    sizes = checks.plain(sizes)
    return (
        isinstance(sizes, (tuple, list))
        and all(type(size) is int for size in sizes)
        and tuple(sizes) in allowed
    )


def check_operands(
    a: Any,
    b: Any,
    recipe: Any,
    recipe_a: Any,
    recipe_b: Any,
    disable_ue8m0_cast: Any = False,
    expected_m_for_psum_layout: Any = None,
) -> None:
    """Both operands are pairs, the recipe is known, and what is ignored has the right type."""
    options = (recipe, recipe_a, recipe_b, expected_m_for_psum_layout)
    if options == _NO_OPTIONS and disable_ue8m0_cast is False and are_pairs(a, b):
        return  # almost every call; what follows takes as long as the rest of a cached one
    check_pair("a", a)
    check_pair("b", b)
    check_recipe(recipe, recipe_a, recipe_b)
    checks.boolean("disable_ue8m0_cast", disable_ue8m0_cast)
    if expected_m_for_psum_layout is not None:
        checks.integer("expected_m_for_psum_layout", expected_m_for_psum_layout, 0)


def rows_per_scale(recipe: Any, recipe_b: Any) -> int:
    """The rows of `b` that share a scale."""
    if recipe is not None:
        return int(recipe[1])
    return BLOCK if recipe_b is None else int(recipe_b[0])


# ---- checks of operators ------------------------------------------------------------------------


def check_codes(name: str, x: Any, dims: tuple[str, ...], **more: Any) -> None:
    """e4m3 data with a multiple of 128 channels; rows start on 16 bytes."""
    checks.tensor(name, x, dims, torch.float8_e4m3fn, unit_inner_stride=True, **more)
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"{name} must have a multiple of {BLOCK} channels, got {x.shape[-1]}; quantize with "
            "padded channels"
        )


def check_fp4_weights(
    b: Any, shifts: Any, sf: Any, dims: tuple[str, ...], groups: tuple[Any, ...], k: int
) -> None:
    """Packed e2m1 `[..., N, K / 2]` with its shifts and scales, as `prepare_fp4_weights` makes it.

    `groups` has the sizes of the leading dimensions, None for any.
    """
    names = (*dims[:-1], "K / 2")
    checks.tensor("b", b, names, torch.int8, shape=(*groups, None, k // 2), contiguous=True)
    *leading, n, _ = b.shape
    check_columns(n)
    steps, dims = k // BLOCK, dims[:-2]
    checks.tensor(
        "the shifts of b", shifts, (*dims, "K / 128", "N"), torch.int16,
        shape=(*leading, steps, n), contiguous=True,
    )  # fmt: skip
    checks.tensor(
        "the scales of b", sf, (*dims, "blocks", "K / 128"), torch.float32,
        shape=(*leading, ceil_div(n, BLOCK), steps), contiguous=True,
    )  # fmt: skip


def check_columns(n: int) -> None:
    """Rows of the result are multiples of 16 bytes."""
    if n % 8:
        raise ValueError(f"b must have a multiple of 8 rows, the columns of d, got {n}")


def check_row_stride(name: str, x: Tensor) -> None:
    """Rows of a matrix start on 16 bytes and do not overlap."""
    stride = x.stride(0)
    if x.shape[0] > 1 and x.numel():
        if stride * x.element_size() % TMA_BYTES:
            raise ValueError(
                f"{name} must have rows that start at multiples of {TMA_BYTES} bytes, got strides "
                f"{x.stride()}"
            )
        if stride < x.shape[1]:
            raise ValueError(f"{name} must have rows that do not overlap, got strides {x.stride()}")


def row_stride(x: Any) -> int:
    """The stride of rows; that of a single one has no meaning."""
    return x.stride(-2) if x.shape[-2] > 1 else x.shape[-1]


def check_result(
    d: Any, c: Any, dims: tuple[str, ...], shape: tuple[int, ...], dtypes: Any, contiguous: bool
) -> None:
    """`d` has this shape; `c` is like it."""
    checks.tensor(
        "d", d, dims, dtypes, shape=shape, contiguous=contiguous, unit_inner_stride=True
    )  # fmt: skip
    if not contiguous:
        check_row_stride("d", d)
    if c is not None:
        checks.tensor("c", c, dims, d.dtype, shape=shape)
        if any(size > 1 and x != y for size, x, y in zip(shape, c.stride(), d.stride())):
            raise ValueError(f"c must have the strides of d, {d.stride()}, got {c.stride()}")


def check_bf16(name: str, x: Any, dims: tuple[str, ...], **more: Any) -> None:
    """bfloat16 data; rows start on 16 bytes."""
    checks.tensor(name, x, dims, torch.bfloat16, unit_inner_stride=True, **more)
    if x.shape[-1] % 8:
        raise ValueError(f"{name} must have a multiple of 8 channels, got {x.shape[-1]}")


def check_address(name: str, x: Any) -> None:
    """Data starts on 16 bytes, as TMA requires. For specs, inside `launches`; None is skipped."""
    if x is not None and x.alignment % TMA_BYTES:
        raise ValueError(f"{name} must start at a multiple of {TMA_BYTES} bytes in memory")
