"""`m_grouped_fp8_gemm_nt_contiguous`: each group of rows times its own matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.gemm import operands, product
from tile_kernels.gemm.m_grouped import reference
from tile_kernels.gemm.operands import Operand, Recipe
from tile_kernels.gemm.product import Product
from tile_kernels.gemm.tiling import BLOCK, CONTIGUOUS, PSUM, plan_wide
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Host, Launch, Spec
from tile_kernels.runtime.launch import Kernel

_KERNEL = Kernel("tile_kernels.gemm.m_grouped.kernel", "m_grouped_gemm_nt", plan_wide)


class Arguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_sf: Tensor
    d: Tensor
    grouped_layout: Tensor
    use_psum_layout: bool
    rows_per_scale: int

    def check(self) -> None:
        check(self)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        return launches(_KERNEL, self, buffers)


def check(x: Any) -> None:
    """Operands and result fit, and the layout has an element for each row, or each group's end."""
    product.check(x, CONTIGUOUS)
    checks.boolean("use_psum_layout", x.use_psum_layout)
    size, dim = (x.b.shape[0], "G") if x.use_psum_layout else (x.a.shape[0], "M")
    checks.tensor(
        "grouped_layout", x.grouped_layout, (dim,), torch.int32, shape=(size,), contiguous=True
    )


def launches(kernel: Kernel, x: Any, buffers: Sequence[Spec]) -> list[Launch | Host]:
    layout = PSUM if x.use_psum_layout else CONTIGUOUS
    return product.launches(kernel, x, layout, x.grouped_layout, buffers)


def check_values(x: Any) -> None:
    """Groups exist, and each 128 rows have one; padding comes last."""
    layout, groups = x.grouped_layout, x.b.shape[0]
    if x.use_psum_layout:
        checks.in_range("grouped_layout", layout, 0, x.a.shape[0])
        bad = layout[1:] < layout[:-1]
        reason, first = "must not decrease", 1
    else:
        checks.in_range("grouped_layout", layout, -1, groups - 1)
        tiles = layout.view(-1, BLOCK)
        bad = ((tiles != tiles[:, :1]) & (tiles != -1)).flatten()
        reason, first = f"must have one group in each {BLOCK} rows, then -1", 0
    if bad.any():
        where = int(bad.nonzero()[0]) + first
        found = layout[where].item()
        raise ValueError(f"grouped_layout {reason}, but element [{where}] is {found}")


def _reference(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    layout: Tensor,
    psum: bool,
    rows: int,
) -> None:
    reference.m_grouped_fp8_gemm_nt_contiguous(
        (a, a_sf), (b, b_sf), d, layout, (1, rows, BLOCK), psum
    )


M_GROUPED_FP8_GEMM_NT_CONTIGUOUS = Product(
    "gemm.m_grouped_fp8_gemm_nt_contiguous",
    Arguments,
    scratch=product.scratch,
    reference=_reference,
    cost=product.cost,
    dynamic={"a": 1, "a_sf": 1, "d": 1, "grouped_layout": 0},
    check_values=check_values,
)


@M_GROUPED_FP8_GEMM_NT_CONTIGUOUS.public(
    reference=reference.m_grouped_fp8_gemm_nt_contiguous, mutates=("d",)
)
def m_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,  # noqa: ARG001
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiplies each row by the matrix of its group: `d[i] = a[i] @ b[grouped_layout[i]].T`.

    This is the forward product of experts. The rows of a group are contiguous and padded to a
    multiple of 128 rows; groups may be in any order and may be empty. Padding rows of `d` become
    zeros, whatever `a` contains there. `grouped_layout` is read on the device, so the host does not
    synchronize, and a CUDA graph can be replayed with other groups. Each row has the bits that
    `fp8_gemm_nt` computes for it.

    Args:
        a: `(data, scales)` as in `fp8_gemm_nt`, with a multiple of 128 rows.
        b: `(data, scales)`: `[G, N, K]`, float8_e4m3fn, contiguous, and
            `[G, ceil(N / 128), K / 128]` as in `fp8_gemm_nt`.
        d: `[M, N]`, bfloat16, stride 1 along `N`; written and returned.
        grouped_layout: `[M]`, int32, contiguous: the group of each row, -1 for padding, as
            `moe.get_fused_mapping(..., alignment=128)` returns it in `pos_to_expert`. Each 128 rows
            belong to the group of the first of them. With `use_psum_layout`, `[G]`: one past the
            last row of each group, which starts at the next multiple of 128 after the one before.
        recipe: As in `fp8_gemm_nt`.
        use_psum_layout: Whether `grouped_layout` has the ends of groups.
        expected_m_for_psum_layout: Ignored; for compatibility with DeepGEMM.
        recipe_a: As in `fp8_gemm_nt`.
        recipe_b: As in `fp8_gemm_nt`.
        compiled_dims: Ignored; for compatibility with DeepGEMM.
        disable_ue8m0_cast: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> ones = torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(128, 1)
        >>> weights = torch.ones(2, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
        >>> rows = torch.tensor([1] * 100 + [-1] * 28, dtype=torch.int32)
        >>> d = torch.empty(128, 8, dtype=torch.bfloat16)
        >>> m_grouped_fp8_gemm_nt_contiguous(ones, weights, d, rows)[98:102, 0].tolist()
        [128.0, 128.0, 0.0, 0.0]
    """
    M_GROUPED_FP8_GEMM_NT_CONTIGUOUS.require(
        operands.check_operands, a, b, recipe, recipe_a, recipe_b, disable_ue8m0_cast,
        expected_m_for_psum_layout,
    )  # fmt: skip
    rows = operands.rows_per_scale(recipe, recipe_b)
    M_GROUPED_FP8_GEMM_NT_CONTIGUOUS(*a, *b, d, grouped_layout, use_psum_layout, rows)
    return d


# ---- bfloat16 -----------------------------------------------------------------------------------


class PlainArguments(NamedTuple):
    a: Tensor
    b: Tensor
    d: Tensor
    grouped_layout: Tensor
    use_psum_layout: bool

    def check(self) -> None:
        check(self)

    def launches(self) -> list[Launch | Host]:
        return launches(_KERNEL, self, ())


def _reference_bf16(a: Tensor, b: Tensor, d: Tensor, layout: Tensor, psum: bool) -> None:
    reference.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, psum)


M_GROUPED_BF16_GEMM_NT_CONTIGUOUS = Product(
    "gemm.m_grouped_bf16_gemm_nt_contiguous",
    PlainArguments,
    reference=_reference_bf16,
    cost=product.cost,
    dynamic={"a": 1, "d": 1, "grouped_layout": 0},
    check_values=check_values,
)


@M_GROUPED_BF16_GEMM_NT_CONTIGUOUS.public(
    reference=reference.m_grouped_bf16_gemm_nt_contiguous, mutates=("d",)
)
def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    use_psum_layout: bool = False,
    *,
    compiled_dims: str | None = None,  # noqa: ARG001
) -> Tensor:
    """Multiplies each row by the matrix of its group: `d[i] = a[i] @ b[grouped_layout[i]].T`.

    As `m_grouped_fp8_gemm_nt_contiguous`, with the numbers of `bf16_gemm_nt`.

    Args:
        a: `[M, K]`, bfloat16, stride 1 along `K`; `M` is a multiple of 128, `K` of 8.
        b: `[G, N, K]`, bfloat16, contiguous; `N` is a multiple of 8.
        d: `[M, N]`, bfloat16, stride 1 along `N`; written and returned.
        grouped_layout: As in `m_grouped_fp8_gemm_nt_contiguous`.
        use_psum_layout: Whether `grouped_layout` has the ends of groups.
        compiled_dims: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> ones, weights = torch.ones(128, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16()
        >>> rows = torch.tensor([1] * 100 + [-1] * 28, dtype=torch.int32)
        >>> d = torch.empty(128, 8, dtype=torch.bfloat16)
        >>> m_grouped_bf16_gemm_nt_contiguous(ones, weights, d, rows)[98:102, 0].tolist()
        [16.0, 16.0, 0.0, 0.0]
    """
    M_GROUPED_BF16_GEMM_NT_CONTIGUOUS(a, b, d, grouped_layout, use_psum_layout)
    return d
