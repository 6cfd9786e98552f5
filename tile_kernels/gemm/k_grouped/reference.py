"""References of the sums over groups of rows: weight gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm.product_reference import Operand, widened


def joined(data: Tensor, rows: int, ks: Sequence[int]) -> Tensor:
    """One `[rows, k]` matrix after another in memory as one `[rows, sum of ks]` matrix."""
    parts, start = [], 0
    for k in ks:
        parts.append(data[start : start + rows * k].view(rows, k))
        start += rows * k
    return torch.cat(parts, dim=1) if parts else data.new_empty(rows, 0)


def by_steps(sf: Tensor, rows: int) -> Tensor:
    """Scales as `[steps, rows]`; DeepGEMM's are the transposed view of that."""
    return sf if sf.shape[1] == rows and sf.is_contiguous() else sf.T


def _starts_and_ends(grouped_layout: Tensor, unit: int) -> list[tuple[int, int]]:
    """Rows of each group; a size counts in whole steps of `unit` rows."""
    sizes = [size // unit * unit for size in grouped_layout.clamp(min=0).tolist()]
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends)]


def k_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    ks: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),  # noqa: ARG001
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.k_grouped_fp8_gemm_nt_contiguous`."""
    widths = []
    for (data, sf), rows in ((a, d.shape[1]), (b, d.shape[2])):
        matrix = joined(data, rows, ks or ()) if data.dim() == 1 else data
        widths.append(widened(matrix, by_steps(sf, rows).mT, 1))
    left, right = widths
    for g, (start, end) in enumerate(_starts_and_ends(grouped_layout, 128)):
        part = left[:, start:end] @ right[:, start:end].mT
        d[g] = (part if c is None else c[g].double() + part).to(d.dtype)
    return d


def k_grouped_fp8_gemm_tn_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    ks: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.k_grouped_fp8_gemm_tn_contiguous`."""
    return k_grouped_fp8_gemm_nt_contiguous(
        (a[0].mT, a[1]), (b[0].mT, b[1]), d, ks, grouped_layout, c, recipe
    )


def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks: Sequence[int] | None,  # noqa: ARG001
    grouped_layout: Tensor,
    c: Tensor | None = None,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.k_grouped_bf16_gemm_tn_contiguous`."""
    for g, (start, end) in enumerate(_starts_and_ends(grouped_layout, 64)):
        part = a[start:end].double().mT @ b[start:end].double()
        d[g] = (part if c is None else c[g].double() + part).to(d.dtype)
    return d
