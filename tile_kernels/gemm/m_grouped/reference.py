"""Reference of the products of groups of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm.product_reference import Operand, rows_of_b, widened


def groups_of_rows(ends: Tensor, num_rows: int) -> Tensor:
    """The group of each row, -1 for padding, where groups are given by the ends of their rows."""
    groups = torch.full((num_rows,), -1, dtype=torch.int32, device=ends.device)
    start = 0
    for g, end in enumerate(ends.tolist()):
        groups[start:end] = g
        start = max(start, -(-end // 128) * 128)
    return groups


def _groups(layout: Tensor, num_rows: int, use_psum_layout: bool) -> Tensor:
    """The group of each row. 128 rows have that of the first of them, others count as padding."""
    if use_psum_layout:
        return groups_of_rows(layout, num_rows)
    tiles = layout.view(-1, 128)
    return torch.where(tiles == tiles[:, :1], tiles, -1).flatten()


def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: tuple[int, int, int] | None = None,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,  # noqa: ARG001
    *,
    recipe_a: tuple[int, int] | None = None,  # noqa: ARG001
    recipe_b: tuple[int, int] | None = None,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.m_grouped_fp8_gemm_nt_contiguous`."""
    groups = _groups(grouped_layout, d.shape[0], use_psum_layout)
    rows = rows_of_b(recipe, recipe_b, 128)
    d.zero_()
    for g in range(b[0].shape[0]):
        mine = groups == g
        left, right = widened(a[0][mine], a[1][mine], 1), widened(b[0][g], b[1][g], rows)
        d[mine] = (left @ right.mT).to(d.dtype)
    return d


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    use_psum_layout: bool = False,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.m_grouped_bf16_gemm_nt_contiguous`."""
    groups = _groups(grouped_layout, d.shape[0], use_psum_layout)
    d.zero_()
    for g in range(b.shape[0]):
        mine = groups == g
        d[mine] = (a[mine].double() @ b[g].double().mT).to(d.dtype)
    return d
