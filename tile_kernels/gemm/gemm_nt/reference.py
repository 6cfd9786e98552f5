"""References of the dense products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tile_kernels.gemm.product_reference import Operand, rows_of_b, widened


def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,  # noqa: ARG001
    recipe_b: tuple[int, int] | None = None,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.fp8_gemm_nt`."""
    total = widened(*a, 1) @ widened(*b, rows_of_b(recipe, recipe_b, 128)).mT
    return d.copy_(total if c is None else c.double() + total)


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, **_: Any) -> Tensor:
    """See `tile_kernels.gemm.bf16_gemm_nt`."""
    total = a.double() @ b.double().mT
    return d.copy_(total if c is None else c.double() + total)
