"""Scales of operands: their layouts, their checks, and the launches that bring them into order.

Scales of rows lie "MN-major": `[rows, steps]` with strides `(1, align(rows, 4))`, so that the
copy engine fetches the scales of a tile for one step as one run of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm import tiling
from tile_kernels.gemm.mn_major.plan import plan as plan_mn_major
from tile_kernels.gemm.operands import check_address
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Launch, Out, Spec, contiguous_strides, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.utils import align, ceil_div

MN_MAJOR = Kernel("tile_kernels.gemm.mn_major.kernel", "mn_major", plan_mn_major)

SCALE_DTYPES = (torch.float32, torch.int32)
_PACKED = 4  # exponents in a word


def is_mn_major(sf: Any) -> bool:
    """Whether scales `[..., rows, steps]` have strides `(1, align(rows, 4))`."""
    rows, steps = sf.shape[-2:]
    padded = align(rows, 4)
    by_rows = sf.stride(-2) == 1 or rows == 1
    by_steps = sf.stride(-1) == padded or steps == 1
    if len(sf.shape) == 3 and sf.shape[0] > 1:
        return bool(by_rows and by_steps and sf.stride(0) == steps * padded)
    return bool(by_rows and by_steps)


def mn_major_out(name: str, sf: Any) -> Out:
    """A result with the same scales, MN-major; launches get `[..., steps, align(rows, 4)]`."""
    *groups, rows, steps = sf.shape
    padded = align(rows, 4)
    strides = (*(steps * padded for _ in groups), 1, padded)
    return Out(name, sf.shape, sf.dtype, strides, base=(*groups, steps, padded))


def scratch(*scales: Any) -> tuple[Out, ...]:
    """Buffers `[..., steps, rows]` for those scales of rows that are row-major."""
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


# ---- checks -------------------------------------------------------------------------------------


def check_row_scales(name: str, sf: Any, shape: tuple[int, ...], steps: int) -> None:
    """Scales of rows `[..., rows, steps]`: float32, or packed exponents; MN-major or row-major."""
    _check_shape(name, sf, ("groups", "rows", "steps"), shape, steps)
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
    shape = (*groups, ceil_div(n, BLOCK))
    _check_shape("b", sf, ("groups", "blocks", "steps"), shape, steps)
    if not (sf.is_contiguous() or _is_transposed(sf)):
        raise ValueError(
            "the scales of b must be contiguous, or so after swapping their last two dimensions, "
            f"as tile_kernels.quant.per_block_cast returns them, got strides {tuple(sf.stride())}"
        )


def _check_shape(
    name: str, sf: Any, dims: tuple[str, ...], shape: tuple[int, ...], steps: int
) -> None:
    """`[*shape, steps]`, or four steps in a word."""
    name, dims = f"the scales of {name}", dims[-len(shape) - 1 :]
    checks.tensor(name, sf, dims, SCALE_DTYPES)
    words = ceil_div(steps, _PACKED) if sf.dtype == torch.int32 else steps
    checks.tensor(name, sf, dims, shape=(*shape, words))


def _is_transposed(sf: Any) -> bool:
    """Whether scales are contiguous with their last two dimensions swapped."""
    rows, steps = sf.shape[-2:]
    wanted = (rows * steps, 1, rows)[-len(sf.shape) :]
    return all(size <= 1 or x == y for size, x, y in zip(sf.shape, sf.stride(), wanted))


# ---- as kernels read them -----------------------------------------------------------------------


def kind(sf: Any, rows: int = 1) -> str:
    """How a kernel reads scales that so many rows share."""
    packed = sf.dtype == torch.int32
    if rows == 1:
        return tiling.ROW_UE8M0 if packed else tiling.ROW
    if sf.is_contiguous():
        return tiling.SQUARE_UE8M0 if packed else tiling.SQUARE
    return tiling.SQUARE_TRANSPOSED_UE8M0 if packed else tiling.SQUARE_TRANSPOSED


def row_scales(name: str, sf: Any, buffers: Iterator[Spec]) -> tuple[Spec, list[Launch]]:
    """Scales of rows as `[..., steps, rows]`; a launch writes row-major ones to a buffer."""
    if is_mn_major(sf):
        check_address(f"the scales of {name}", sf)
        return sf.apply(_swapped, like=Spec(*_by_steps(sf), sf.dtype, sf.device)), []
    out = next(buffers)
    return out, [mn_major_launch(sf, out)]


def b_scales(sf: Any, rows: int, buffers: Iterator[Spec]) -> tuple[Spec, list[Launch]]:
    """Scales of `b` that so many rows share; those of blocks are contiguous."""
    if rows == 1:
        return row_scales("b", sf, buffers)
    if sf.is_contiguous():
        return sf, []
    shape = (*sf.shape[:-2], sf.shape[-1], sf.shape[-2])
    like = Spec(shape, contiguous_strides(shape), sf.dtype, sf.device)
    return sf.apply(Tensor.transpose, -1, -2, like=like), []


def mn_major_launch(sf: Any, out: Spec) -> Launch:
    """Row-major scales `[..., rows, steps]` to `[..., steps, rows]`, padding rows zero."""
    return Launch(MN_MAJOR, (dtype_name(sf), sf.dim() == 3, sf.shape[-1]), (sf, out))
