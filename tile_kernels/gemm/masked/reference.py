"""Reference of the products of groups whose sizes are known on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tile_kernels.gemm.product_reference import Operand, rows_of_b, widened


def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,  # noqa: ARG001
    recipe: tuple[int, int, int] | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,  # noqa: ARG001
    recipe_b: tuple[int, int] | None = None,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.m_grouped_fp8_gemm_nt_masked`."""
    rows = rows_of_b(recipe, recipe_b, 128)
    for g, m in enumerate(masked_m.clamp(0, d.shape[1]).tolist()):
        left, right = widened(a[0][g, :m], a[1][g, :m], 1), widened(b[0][g], b[1][g], rows)
        d[g, :m] = (left @ right.mT).to(d.dtype)
    return d


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,  # noqa: ARG001
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.m_grouped_bf16_gemm_nt_masked`."""
    for g, m in enumerate(masked_m.clamp(0, d.shape[1]).tolist()):
        d[g, :m] = (a[g, :m].double() @ b[g].double().mT).to(d.dtype)
    return d
