"""What the declarations of the products share.

Each product is declared by a record of its arguments: `a`, `b` and `d`; with e4m3 rows `a_sf` and
`b_sf`, and `rows_per_scale` of e4m3 weights or `b_shifts` of e2m1 ones; `c` and `accumulate` where
something can be added.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm import operands, scales, tiling
from tile_kernels.gemm.tiling import BLOCK, CONTIGUOUS, DENSE, HOPPER, K_GROUPED, MASKED
from tile_kernels.runtime.cases import Cost, tensors_in
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

RESULTS = (torch.bfloat16, torch.float32)


def _no_outputs(x: Any) -> None:
    """The products write `d`, and allocate no results."""


def scratch(x: Any) -> tuple[Out, ...]:
    """What row-major scales of rows are copied to."""
    by_row = getattr(x, "rows_per_scale", BLOCK) == 1
    return scales.scratch(*((x.a_sf, x.b_sf) if by_row else (x.a_sf,)))


Product = functools.partial(Operator, outputs=_no_outputs, mutates=("d",), archs=(HOPPER,))


def check(x: Any, layout: str) -> None:
    """Operands, scales and result of a product with this layout of rows fit together."""
    masked, scaled, expanded = layout == MASKED, hasattr(x, "a_sf"), hasattr(x, "b_shifts")
    check_data = operands.check_codes if scaled else operands.check_bf16
    dims = ("G", "max_m") if masked else ("M",)
    check_data("a", x.a, (*dims, "K"), contiguous=masked)
    *rows, k = x.a.shape
    if not masked:
        operands.check_row_stride("a", x.a)
    if layout == CONTIGUOUS and rows[0] % BLOCK:
        raise ValueError(
            f"a must have a multiple of {BLOCK} rows, got {rows[0]}; "
            f"tile_kernels.moe.get_fused_mapping(..., alignment={BLOCK}) pads groups to that"
        )
    leading: tuple[int | None, ...] = {DENSE: (), CONTIGUOUS: (None,), MASKED: (rows[0],)}[layout]
    b_dims = ("G", "N", "K")[1 - len(leading) :]
    if expanded:
        operands.check_fp4_weights(x.b, x.b_shifts, x.b_sf, b_dims, leading, k)
    else:
        check_data("b", x.b, b_dims, shape=(*leading, None, k), contiguous=True)
        operands.check_columns(x.b.shape[-2])
    *groups, n, _ = x.b.shape
    if scaled:
        scales.check_row_scales("a", x.a_sf, tuple(rows), k // BLOCK)
        if not expanded:
            scales.check_b_scales(x.b_sf, tuple(groups), n, k // BLOCK, x.rows_per_scale)
    dtypes = RESULTS if layout == DENSE else torch.bfloat16
    c = getattr(x, "c", None)
    operands.check_result(x.d, c, (*dims, "N"), (*rows, n), dtypes, contiguous=masked)


def launches(
    kernel: Kernel, x: Any, layout: str, tensor: Any, buffers: Sequence[Spec], *head: Any
) -> list[Launch | Host]:
    """The launch of a product, after those that bring row-major scales into order.

    Args:
        kernel: What multiplies.
        x: The record of the operator.
        layout: A layout of rows.
        tensor: What the layout is read from, or None.
        buffers: The scratch memory of the call.
        head: What comes before the fields of `Problem`.
    """
    a, b, d = x.a, x.b, x.d
    c, accumulate = getattr(x, "c", None), getattr(x, "accumulate", False)
    if d.numel() == 0:
        return []
    if a.numel() == 0 or b.numel() == 0:  # sums without terms
        if accumulate:
            return []
        return [Host(Tensor.zero_, (d,)) if c is None else Host(Tensor.copy_, (d, c))]
    shifts = getattr(x, "b_shifts", None)
    named = (("a", a), ("b", b), ("the shifts of b", shifts), ("d", d), ("c", c))
    for name, data in named:
        operands.check_address(name, data)
    a_sf, weights, kinds, before = _operands(x, layout, buffers)
    k_grouped = layout == K_GROUPED
    addend = "d" if accumulate else "" if c is None else "c"
    problem = (
        *head, layout, dtype_name(a), a.shape[0] if k_grouped else 0, b.shape[-2],
        0 if k_grouped else a.shape[-1], 0 if k_grouped else operands.row_stride(a),
        operands.row_stride(d), dtype_name(d), addend, *kinds,
    )  # fmt: skip
    return [*before, Launch(kernel, problem, (a, a_sf, *weights, tensor, c, d))]


def _operands(
    x: Any, layout: str, buffers: Sequence[Spec]
) -> tuple[Any, tuple[Any, ...], tuple[str, str], list[Launch]]:
    """Scales of `a`, weights with theirs, how a kernel reads both scales, and launches before."""
    if not hasattr(x, "a_sf"):
        return None, (x.b, None), (tiling.NONE, tiling.NONE), []
    if layout == K_GROUPED:
        for name, sf in (("a", x.a_sf), ("b", x.b_sf)):
            operands.check_address(f"the scales of {name}", sf)
        return x.a_sf, (x.b, x.b_sf), (tiling.ROW, tiling.ROW), []
    left = iter(buffers)
    a_sf, before = scales.row_scales("a", x.a_sf, left)
    if hasattr(x, "b_shifts"):
        weights = x.b.view(torch.uint32), x.b_shifts, x.b_sf
        return a_sf, weights, (scales.kind(x.a_sf), tiling.SQUARE_E2M1), before
    b_sf, more = scales.b_scales(x.b_sf, x.rows_per_scale, left)
    kinds = scales.kind(x.a_sf), scales.kind(x.b_sf, x.rows_per_scale)
    return a_sf, (x.b, b_sf), kinds, before + more


def cost(a: Any, b: Any, d: Tensor, c: Any = None, grouped_layout: Any = None, **_: Any) -> Cost:
    """Of a dense product, or of one of groups of rows."""
    return cost_of((a, b, c, grouped_layout), d, 2 * d.numel() * tensors_in((a,))[0].shape[-1])


def cost_of(read: Any, d: Tensor, flops: int) -> Cost:
    """Bytes of what is read and of the result, and multiply-adds as two operations."""
    moved = sum(x.numel() * x.element_size() for x in (*tensors_in(read), d))
    return Cost(bytes=moved, flops=flops)
