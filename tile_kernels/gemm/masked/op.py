"""`m_grouped_fp8_gemm_nt_masked`: products of groups whose sizes are known on the device only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.gemm import operands, product
from tile_kernels.gemm.masked import reference
from tile_kernels.gemm.masked.plan import is_small, plan
from tile_kernels.gemm.operands import Operand, Recipe
from tile_kernels.gemm.product import Product
from tile_kernels.gemm.tiling import BLOCK, MASKED
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost, tensors_in
from tile_kernels.runtime.declaration import Host, Launch, Spec
from tile_kernels.runtime.launch import Kernel

_KERNEL = Kernel("tile_kernels.gemm.masked.kernel", "masked_gemm_nt", plan)


class Arguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_sf: Tensor
    d: Tensor
    masked_m: Tensor
    expected_m: int
    rows_per_scale: int

    def check(self) -> None:
        check(self)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        return launches(_KERNEL, self, buffers)


def check(x: Any) -> None:
    """Operands and result fit; a size for each group, and the expected one."""
    product.check(x, MASKED)
    groups = x.a.shape[0]
    checks.tensor("masked_m", x.masked_m, ("G",), torch.int32, shape=(groups,), contiguous=True)
    checks.integer("expected_m", x.expected_m, 1, checks.MOST_SIZE)


def launches(kernel: Kernel, x: Any, buffers: Sequence[Spec]) -> list[Launch | Host]:
    small = is_small(x.expected_m, x.a.shape[1])
    return product.launches(kernel, x, MASKED, x.masked_m, buffers, small)


def check_values(x: Any) -> None:
    checks.in_range("masked_m", x.masked_m, 0, x.a.shape[1])


def cost(a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int, **_: Any) -> Cost:
    """With `expected_m` rows in each group."""
    groups, m, n = d.shape
    data, rows = tensors_in((a,))[0], groups * min(m, expected_m)
    k = data.shape[2]
    weights = product.cost_of((b, masked_m), d[:0], 2 * rows * n * k)
    return Cost(weights.bytes + rows * (k * data.element_size() + 2 * n), weights.flops)


def _reference(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, d: Tensor, masked_m: Tensor, m: int, rows: int
) -> None:
    reference.m_grouped_fp8_gemm_nt_masked(
        (a, a_sf), (b, b_sf), d, masked_m, m, (1, rows, BLOCK)
    )  # fmt: skip


M_GROUPED_FP8_GEMM_NT_MASKED = Product(
    "gemm.m_grouped_fp8_gemm_nt_masked",
    Arguments,
    scratch=product.scratch,
    reference=_reference,
    cost=cost,
    check_values=check_values,
)


@M_GROUPED_FP8_GEMM_NT_MASKED.public(
    reference=reference.m_grouped_fp8_gemm_nt_masked, mutates=("d",)
)
def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,  # noqa: ARG001
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiplies the first rows of each group: `d[g, :m] = a[g, :m] @ b[g].T`, `m = masked_m[g]`.

    This is the product of experts in decoding, where the sizes are known on the device only. Rows
    of `d` beyond the size of a group may be overwritten and are undefined. The other rows have the
    bits that `fp8_gemm_nt` computes for them.

    Args:
        a: `(data, scales)`: `[G, max_m, K]`, float8_e4m3fn, contiguous, and `[G, max_m, K / 128]`,
            each group as in `fp8_gemm_nt`.
        b: As in `m_grouped_fp8_gemm_nt_contiguous`.
        d: `[G, max_m, N]`, bfloat16, contiguous; written and returned.
        masked_m: `[G]`, int32: the rows of each group; cut to `0..max_m`.
        expected_m: About how many rows a group has, at least 1. It decides the tile size, never
            the result.
        recipe: As in `fp8_gemm_nt`.
        recipe_a: As in `fp8_gemm_nt`.
        recipe_b: As in `fp8_gemm_nt`.
        compiled_dims: Ignored; for compatibility with DeepGEMM.
        disable_ue8m0_cast: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> ones = torch.ones(1, 4, 128).to(torch.float8_e4m3fn), torch.ones(1, 4, 1)
        >>> weights = torch.ones(1, 8, 128).to(torch.float8_e4m3fn), torch.ones(1, 1, 1)
        >>> d = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
        >>> sizes = torch.tensor([3], dtype=torch.int32)
        >>> m_grouped_fp8_gemm_nt_masked(ones, weights, d, sizes, 4)[0, :3, 0].tolist()
        [128.0, 128.0, 128.0]
    """
    M_GROUPED_FP8_GEMM_NT_MASKED.require(
        operands.check_operands, a, b, recipe, recipe_a, recipe_b, disable_ue8m0_cast
    )
    rows = operands.rows_per_scale(recipe, recipe_b)
    M_GROUPED_FP8_GEMM_NT_MASKED(*a, *b, d, masked_m, expected_m, rows)
    return d


# ---- bfloat16 -----------------------------------------------------------------------------------


class PlainArguments(NamedTuple):
    a: Tensor
    b: Tensor
    d: Tensor
    masked_m: Tensor
    expected_m: int

    def check(self) -> None:
        check(self)

    def launches(self) -> list[Launch | Host]:
        return launches(_KERNEL, self, ())


def _reference_bf16(a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    reference.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m)


M_GROUPED_BF16_GEMM_NT_MASKED = Product(
    "gemm.m_grouped_bf16_gemm_nt_masked",
    PlainArguments,
    reference=_reference_bf16,
    cost=cost,
    check_values=check_values,
)


@M_GROUPED_BF16_GEMM_NT_MASKED.public(
    reference=reference.m_grouped_bf16_gemm_nt_masked, mutates=("d",)
)
def m_grouped_bf16_gemm_nt_masked(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    *,
    compiled_dims: str | None = None,  # noqa: ARG001
) -> Tensor:
    """Multiplies the first rows of each group: `d[g, :m] = a[g, :m] @ b[g].T`, `m = masked_m[g]`.

    As `m_grouped_fp8_gemm_nt_masked`, with the numbers of `bf16_gemm_nt`.

    Args:
        a: `[G, max_m, K]`, bfloat16, contiguous; `K` is a multiple of 8.
        b: `[G, N, K]`, bfloat16, contiguous; `N` is a multiple of 8.
        d: `[G, max_m, N]`, bfloat16, contiguous; written and returned.
        masked_m: `[G]`, int32: the rows of each group; cut to `0..max_m`.
        expected_m: About how many rows a group has, at least 1. It decides the tile size, never
            the result.
        compiled_dims: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> ones, weights = torch.ones(1, 4, 16).bfloat16(), torch.ones(1, 8, 16).bfloat16()
        >>> d = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
        >>> sizes = torch.tensor([3], dtype=torch.int32)
        >>> m_grouped_bf16_gemm_nt_masked(ones, weights, d, sizes, 4)[0, :3, 0].tolist()
        [16.0, 16.0, 16.0]
    """
    M_GROUPED_BF16_GEMM_NT_MASKED(a, b, d, masked_m, expected_m)
    return d
