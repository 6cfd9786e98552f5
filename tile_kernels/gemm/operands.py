"""What the declarations of the products share: pairs of data and scales, their checks and layouts.

Scales of rows lie "MN-major": `[rows, steps]` with strides `(1, align(rows, 4))`, so that the
copy engine fetches the scales of a tile for one step as one run of memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm import tiling
from tile_kernels.gemm.mn_major.plan import plan as plan_mn_major
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost, tensors_in
from tile_kernels.runtime.declaration import (
    Host,
    Launch,
    Out,
    Spec,
    contiguous_strides,
    dtype_name,
)
from tile_kernels.runtime.launch import Kernel
from tile_kernels.utils import align, ceil_div

MN_MAJOR = Kernel("tile_kernels.gemm.mn_major.kernel", "mn_major", plan_mn_major)

Operand = tuple[Tensor, Tensor]
Recipe = tuple[int, int, int]

BY_BLOCK: Recipe = (1, BLOCK, BLOCK)
BY_ROW: Recipe = (1, 1, BLOCK)
_PACKED = 4  # exponents in a word
SCALE_DTYPES = (torch.float32, torch.int32)
_TMA_BYTES = 16
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
        if stride * x.element_size() % _TMA_BYTES:
            raise ValueError(
                f"{name} must have rows that start at multiples of {_TMA_BYTES} bytes, got strides "
                f"{x.stride()}"
            )
        if stride < x.shape[1]:
            raise ValueError(f"{name} must have rows that do not overlap, got strides {x.stride()}")


def row_stride(x: Any) -> int:
    """The stride of rows; that of a single one has no meaning."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def check_row_scales(name: str, sf: Any, shape: tuple[int, ...], steps: int) -> None:
    """Scales of rows `[..., rows, steps]`: float32, or packed exponents; MN-major or row-major."""
    dims = ("groups", "rows", "steps")[-len(shape) - 1 :]
    checks.tensor(f"the scales of {name}", sf, dims, SCALE_DTYPES)
    words = ceil_div(steps, _PACKED) if sf.dtype == torch.int32 else steps
    checks.tensor(f"the scales of {name}", sf, dims, SCALE_DTYPES, shape=(*shape, words))
    if not (is_mn_major(sf) or sf.is_contiguous()):
        raise ValueError(
            f"the scales of {name} must be contiguous or MN-major, as "
            "tile_kernels.gemm.get_mn_major_tma_aligned_tensor or "
            "quant.per_token_cast(..., use_tma_aligned_col_major_sf=True) returns them, got "
            f"strides {tuple(sf.stride())} for shape {tuple(sf.shape)}"
        )


def check_b_scales(sf: Any, groups: tuple[int, ...], n: int, steps: int, rows: int) -> None:
    """Scales of `b`, of its rows or of its 128 x 128 blocks."""
    if rows == 1:
        check_row_scales("b", sf, (*groups, n), steps)
        return
    dims = ("groups", "blocks", "steps")[-len(groups) - 2 :]
    checks.tensor("the scales of b", sf, dims, SCALE_DTYPES)
    words = ceil_div(steps, _PACKED) if sf.dtype == torch.int32 else steps
    shape = (*groups, ceil_div(n, BLOCK), words)
    checks.tensor("the scales of b", sf, dims, SCALE_DTYPES, shape=shape)
    if not (sf.is_contiguous() or is_transposed(sf)):
        raise ValueError(
            "the scales of b must be contiguous, or so after swapping their last two dimensions, "
            f"as tile_kernels.quant.per_block_cast returns them, got strides {tuple(sf.stride())}"
        )


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


def fp8_launches(
    kernel: Kernel,
    x: Any,
    head: tuple[Any, ...],
    layout: str,
    tensor: Any,
    strides: tuple[int, int],
    buffers: Sequence[Spec],
) -> list[Any]:
    """The launch of a product of e4m3 rows, after those that bring row-major scales into order.

    Args:
        kernel: What multiplies.
        x: The record of the operator: `a`, `a_sf`, `b`, `b_sf`, `d`; `c` and `accumulate` where
            something can be added; `rows_per_scale` of e4m3 weights or `b_shifts` of e2m1 ones.
        head: What comes before the fields of `Problem`.
        layout: A layout of rows.
        tensor: What the layout is read from, or None.
        strides: Of the rows of `a` and of `d`.
        buffers: The scratch memory of the call.
    """
    a, b, d = x.a, x.b, x.d
    c, accumulate = getattr(x, "c", None), getattr(x, "accumulate", False)
    shifts = getattr(x, "b_shifts", None)
    if d.numel() == 0:
        return []
    if b.numel() == 0:
        return without_product(d, c, accumulate)
    named = (("a", a), ("b", b), ("the shifts of b", shifts), ("d", d), ("c", c))
    for name, data in named:
        check_address(name, data)
    weights: tuple[Any, ...]
    if shifts is None:
        a_sf, b_sf, before = scales_and_launches(x.a_sf, x.b_sf, x.rows_per_scale, buffers)
        weights, b_scale = (b, b_sf), b_scale_kind(x.b_sf, x.rows_per_scale)
    else:
        (a_sf,), before = row_scale_launches({"a": x.a_sf}, buffers)
        weights, b_scale = (b.view(torch.uint32), shifts, x.b_sf), tiling.SQUARE_E2M1
    problem = (
        *head, layout, dtype_name(a), 0, b.shape[-2], a.shape[-1], *strides, dtype_name(d),
        addend(c, accumulate), a_scale_kind(x.a_sf), b_scale,
    )  # fmt: skip
    return [*before, Launch(kernel, problem, (a, a_sf, *weights, tensor, c, d))]


def bf16_launches(
    kernel: Kernel,
    x: Any,
    head: tuple[Any, ...],
    layout: str,
    tensor: Any,
    a_stride: int,
    d_stride: int,
) -> list[Any]:
    """The launch of a product without scales; `head` comes before the fields of `Problem`."""
    a, b, d = x.a, x.b, x.d
    c, accumulate = getattr(x, "c", None), getattr(x, "accumulate", False)
    if d.numel() == 0:
        return []
    if a.numel() == 0 or b.numel() == 0:
        return without_product(d, c, accumulate)
    for name, data in (("a", a), ("b", b), ("d", d), ("c", c)):
        check_address(name, data)
    k_grouped = layout == tiling.K_GROUPED
    problem = (
        *head, layout, dtype_name(a), a.shape[0] if k_grouped else 0, b.shape[-2],
        0 if k_grouped else a.shape[-1], a_stride, d_stride, dtype_name(d),
        addend(c, accumulate), tiling.NONE, tiling.NONE,
    )  # fmt: skip
    return [Launch(kernel, problem, (a, None, b, None, tensor, c, d))]


# ---- layouts of scales --------------------------------------------------------------------------


def is_mn_major(sf: Any) -> bool:
    """Whether scales `[..., rows, steps]` have strides `(1, align(rows, 4))`."""
    rows, steps = sf.shape[-2:]
    padded = align(rows, 4)
    by_rows = sf.stride(-2) == 1 or rows == 1
    by_steps = sf.stride(-1) == padded or steps == 1
    if len(sf.shape) == 3 and sf.shape[0] > 1:
        return bool(by_rows and by_steps and sf.stride(0) == steps * padded)
    return bool(by_rows and by_steps)


def is_transposed(sf: Any) -> bool:
    """Whether scales are contiguous with their last two dimensions swapped."""
    rows, steps = sf.shape[-2:]
    wanted = (rows * steps, 1, rows)[-len(sf.shape) :]
    return all(size <= 1 or x == y for size, x, y in zip(sf.shape, sf.stride(), wanted))


def mn_major_out(name: str, sf: Any) -> Out:
    """A result with the same scales, MN-major; launches get `[..., steps, align(rows, 4)]`."""
    *groups, rows, steps = sf.shape
    padded = align(rows, 4)
    strides = (*(steps * padded for _ in groups), 1, padded)
    return Out(name, sf.shape, sf.dtype, strides, base=(*groups, steps, padded))


def row_scale_scratch(*scales: Any) -> tuple[Out, ...]:
    """Buffers `[..., steps, rows]` for those scales that are row-major."""
    found = []
    for i, sf in enumerate(scales):
        if not is_mn_major(sf):
            shape, strides = _by_steps(sf)
            found.append(Out(f"scales_{i}", shape, sf.dtype, strides))
    return tuple(found)


def _by_steps(sf: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of MN-major scales as kernels read them: unit stride along rows."""
    *groups, rows, steps = sf.shape
    padded = align(rows, 4)
    return (*groups, steps, rows), (*(steps * padded for _ in groups), padded, 1)


def _swapped(sf: Tensor) -> Tensor:
    return sf.as_strided(*_by_steps(sf))


def row_scale_launches(
    scales: dict[str, Any], scratch: Sequence[Spec]
) -> tuple[list[Any], list[Any]]:
    """Scales of the operands by name as kernels read them, `[..., steps, rows]`; and launches that
    bring row-major ones into this layout."""
    buffers, found, launches = iter(scratch), [], []
    for name, sf in scales.items():
        if is_mn_major(sf):
            check_address(f"the scales of {name}", sf)
            found.append(sf.apply(_swapped, like=Spec(*_by_steps(sf), sf.dtype, sf.device)))
        else:
            found.append(next(buffers))
            launches.append(mn_major_launch(sf, found[-1]))
    return found, launches


def mn_major_launch(sf: Any, out: Spec) -> Launch:
    """Row-major scales `[..., rows, steps]` to `[..., steps, rows]`, padding rows zero."""
    return Launch(MN_MAJOR, (dtype_name(sf), sf.dim() == 3, sf.shape[-1]), (sf, out))


def check_address(name: str, x: Any) -> None:
    """Data starts on 16 bytes, as TMA requires. For specs, inside `launches`; None is skipped."""
    if x is not None and x.alignment % _TMA_BYTES:
        raise ValueError(f"{name} must start at a multiple of {_TMA_BYTES} bytes in memory")


def no_outputs(x: Any) -> None:  # noqa: ARG001
    """The products write `d`, and allocate no results."""
    return


def scratch(x: Any) -> tuple[Out, ...]:
    """What row-major scales of rows are copied to."""
    return row_scale_scratch(*((x.a_sf, x.b_sf) if x.rows_per_scale == 1 else (x.a_sf,)))


# ---- launches -----------------------------------------------------------------------------------


def b_scale_kind(sf: Any, rows: int) -> str:
    """How a kernel reads the scales of `b`."""
    packed = sf.dtype == torch.int32
    if rows == 1:
        return tiling.ROW_UE8M0 if packed else tiling.ROW
    if sf.is_contiguous():
        return tiling.SQUARE_UE8M0 if packed else tiling.SQUARE
    return tiling.SQUARE_TRANSPOSED_UE8M0 if packed else tiling.SQUARE_TRANSPOSED


def a_scale_kind(sf: Any) -> str:
    """How a kernel reads the scales of `a`."""
    return tiling.ROW_UE8M0 if sf.dtype == torch.int32 else tiling.ROW


def square_scales(sf: Any) -> Any:
    """Scales of blocks as the kernel declares them: contiguous."""
    if sf.is_contiguous():
        return sf
    shape = (*sf.shape[:-2], sf.shape[-1], sf.shape[-2])
    return sf.apply(_swap, like=Spec(shape, contiguous_strides(shape), sf.dtype, sf.device))


def _swap(sf: Tensor) -> Tensor:
    return sf.transpose(-1, -2)


def scales_and_launches(
    a_sf: Any, b_sf: Any, rows: int, scratch: Sequence[Spec]
) -> tuple[Any, Any, list[Any]]:
    """The scales of both operands as the kernel reads them, and the launches before it."""
    if rows == 1:
        (a_sf, b_sf), launches = row_scale_launches({"a": a_sf, "b": b_sf}, scratch)
        return a_sf, b_sf, launches
    (a_sf,), launches = row_scale_launches({"a": a_sf}, scratch)
    return a_sf, square_scales(b_sf), launches


def addend(c: Any, accumulate: bool) -> str:
    """Which tensor a kernel adds to the product."""
    return "d" if accumulate else "" if c is None else "c"


def without_product(d: Any, c: Any, accumulate: bool) -> list[Launch | Host]:
    """The steps of a call whose sums have no terms."""
    if accumulate:
        return []
    return [Host(Tensor.zero_, (d,)) if c is None else Host(Tensor.copy_, (d, c))]


def product_cost(read: Any, d: Tensor, flops: int) -> Cost:
    """Bytes of what is read and of the result, and multiply-adds as two operations."""
    moved = sum(x.numel() * x.element_size() for x in (*tensors_in(read), d))
    return Cost(bytes=moved, flops=flops)
