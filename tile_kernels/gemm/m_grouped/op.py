"""`m_grouped_fp8_gemm_nt_contiguous`: each group of rows times its own matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.gemm import operands
from tile_kernels.gemm.m_grouped import reference
from tile_kernels.gemm.m_grouped.plan import plan
from tile_kernels.gemm.operands import Operand, Recipe
from tile_kernels.gemm.tiling import BLOCK, CONTIGUOUS, PSUM
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.gemm.m_grouped.kernel", "m_grouped_gemm_nt", plan)


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
        operands.check_codes("a", self.a, ("M", "K"))
        operands.check_row_stride("a", self.a)
        m, k = self.a.shape
        check_rows(self.a)
        operands.check_codes("b", self.b, ("G", "N", "K"), shape=(None, None, k), contiguous=True)
        groups, n, _ = self.b.shape
        operands.check_columns(n)
        operands.check_row_scales("a", self.a_sf, (m,), k // BLOCK)
        operands.check_b_scales(self.b_sf, (groups,), n, k // BLOCK, self.rows_per_scale)
        operands.check_result(self.d, None, ("M", "N"), (m, n), torch.bfloat16, contiguous=False)
        check_layout(self.grouped_layout, groups, m, self.use_psum_layout)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        layout = PSUM if self.use_psum_layout else CONTIGUOUS
        strides = operands.row_stride(self.a), operands.row_stride(self.d)
        tensor = self.grouped_layout
        return operands.fp8_launches(_KERNEL, self, (), layout, tensor, strides, buffers)


def check_rows(a: Tensor) -> None:
    """Groups start at multiples of 128 rows."""
    if a.shape[0] % BLOCK:
        raise ValueError(
            f"a must have a multiple of {BLOCK} rows, got {a.shape[0]}; "
            f"tile_kernels.moe.get_fused_mapping(..., alignment={BLOCK}) pads groups to that"
        )


def check_layout(layout: Any, groups: int, rows: int, psum: Any) -> None:
    """`grouped_layout` has an element for each row, or the end of each group."""
    checks.boolean("use_psum_layout", psum)
    size, dim = (groups, "G") if psum else (rows, "M")
    checks.tensor("grouped_layout", layout, (dim,), torch.int32, shape=(size,), contiguous=True)


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


def cost(a: Operand, b: Operand, d: Tensor, grouped_layout: Tensor, **_: Any) -> Cost:
    return operands.product_cost((a, b, grouped_layout), d, 2 * d.numel() * a[0].shape[1])


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


M_GROUPED_FP8_GEMM_NT_CONTIGUOUS = Operator(
    "gemm.m_grouped_fp8_gemm_nt_contiguous",
    Arguments,
    outputs=operands.no_outputs,
    scratch=operands.scratch,
    reference=_reference,
    cost=cost,
    dynamic={"a": 1, "a_sf": 1, "d": 1, "grouped_layout": 0},
    mutates=("d",),
    check_values=check_values,
    archs=("sm_90a",),
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
        operands.check_bf16("a", self.a, ("M", "K"))
        operands.check_row_stride("a", self.a)
        check_rows(self.a)
        operands.check_bf16(
            "b", self.b, ("G", "N", "K"), shape=(None, None, self.a.shape[1]), contiguous=True
        )
        groups, n, _ = self.b.shape
        operands.check_columns(n)
        shape = (self.a.shape[0], n)
        operands.check_result(self.d, None, ("M", "N"), shape, torch.bfloat16, contiguous=False)
        check_layout(self.grouped_layout, groups, shape[0], self.use_psum_layout)

    def launches(self) -> list[Launch | Host]:
        layout = PSUM if self.use_psum_layout else CONTIGUOUS
        strides = operands.row_stride(self.a), operands.row_stride(self.d)
        return operands.bf16_launches(_KERNEL, self, (), layout, self.grouped_layout, *strides)


def cost_bf16(a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor, **_: Any) -> Cost:
    return operands.product_cost((a, b, grouped_layout), d, 2 * d.numel() * a.shape[1])


def _reference_bf16(a: Tensor, b: Tensor, d: Tensor, layout: Tensor, psum: bool) -> None:
    reference.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, psum)


M_GROUPED_BF16_GEMM_NT_CONTIGUOUS = Operator(
    "gemm.m_grouped_bf16_gemm_nt_contiguous",
    PlainArguments,
    outputs=operands.no_outputs,
    reference=_reference_bf16,
    cost=cost_bf16,
    dynamic={"a": 1, "d": 1, "grouped_layout": 0},
    mutates=("d",),
    check_values=check_values,
    archs=("sm_90a",),
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
