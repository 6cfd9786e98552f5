"""`fp8_fp4_gemm_nt` and its grouped forms: products of e4m3 rows and weights in packed e2m1."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from tile_kernels.gemm import operands, product
from tile_kernels.gemm.fp4_weights import Fp4Weights, prepare_fp4_weights
from tile_kernels.gemm.fp8_fp4 import reference
from tile_kernels.gemm.gemm_nt.op import fp8_gemm_nt
from tile_kernels.gemm.gemm_nt.plan import plan as dense_plan
from tile_kernels.gemm.m_grouped import op as contiguous
from tile_kernels.gemm.m_grouped.op import m_grouped_fp8_gemm_nt_contiguous
from tile_kernels.gemm.masked import op as masked
from tile_kernels.gemm.masked.op import m_grouped_fp8_gemm_nt_masked
from tile_kernels.gemm.masked.plan import plan as masked_plan
from tile_kernels.gemm.operands import Operand, Recipe
from tile_kernels.gemm.product import Product
from tile_kernels.gemm.tiling import BLOCK, DENSE, GROUP, plan_wide
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Host, Launch, Size, Spec
from tile_kernels.runtime.launch import Kernel

_MODULE, _NAME = "tile_kernels.gemm.fp8_fp4.kernel", "fp8_fp4_gemm_nt"

Weights = Fp4Weights | tuple[Tensor, ...]


# ---- what the forms share -----------------------------------------------------------------------


def _check_weights(
    a: Any, b: Any, recipe: Any, recipe_a: Any, recipe_b: Any, disable_ue8m0_cast: Any
) -> None:
    """`a` is a pair, `b` prepared e2m1 or a pair of e2m1; the recipe is that of e2m1."""
    if (
        type(a) is tuple and len(a) == 2 and type(b) is Fp4Weights and recipe is None
        and recipe_a is None and recipe_b is None and disable_ue8m0_cast is False
    ):  # fmt: skip
        return  # almost every call
    operands.check_pair("a", a)
    if not isinstance(b, (tuple, list)) or len(b) != 3:
        operands.check_pair("b", b)
    for part in b:
        if not isinstance(part, Tensor):
            raise TypeError(f"b must be a tuple of tensors, got {type(part).__name__} in it")
    if recipe is not None:
        raise ValueError(
            f"recipe must be None where b is e2m1, got {checks.shown(recipe)}; its scales are of "
            f"recipe_b=(1, {GROUP})"
        )
    for name, given, wanted in (
        ("recipe_a", recipe_a, (1, BLOCK)),
        ("recipe_b", recipe_b, (1, GROUP)),
    ):
        if given is not None and not _is_recipe(checks.plain(given), wanted):
            raise ValueError(f"{name} must be {wanted} where b is e2m1, got {checks.shown(given)}")
    checks.boolean("disable_ue8m0_cast", disable_ue8m0_cast)


def _is_recipe(given: Any, wanted: tuple[int, int]) -> bool:
    if not isinstance(given, (tuple, list)) or any(type(each) is not int for each in given):
        return False
    return tuple(given) == wanted


def _is_e4m3(b: Any) -> TypeGuard[Operand]:
    """Whether `b` is a pair of e4m3 data and scales."""
    if not isinstance(b, (tuple, list)) or len(b) != 2:
        return False
    return isinstance(b[0], Tensor) and b[0].dtype == torch.float8_e4m3fn


def _prepared(b: Any) -> Any:
    """Weights as they come, or prepared for this call alone."""
    return b if len(b) == 3 else prepare_fp4_weights(b)


# ---- dense --------------------------------------------------------------------------------------

_DENSE = Kernel(_MODULE, _NAME, dense_plan)


class Arguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_shifts: Tensor
    b_sf: Tensor
    d: Tensor
    c: Tensor | None
    accumulate: bool

    def check(self) -> None:
        product.check(self, DENSE)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        rows = Size(lambda x: x.a.shape[0])
        return product.launches(_DENSE, self, DENSE, None, buffers, rows)


def _reference(
    a: Tensor, a_sf: Tensor, b: Tensor, shifts: Tensor, b_sf: Tensor, d: Tensor, c: Any, add: bool
) -> None:
    reference.fp8_fp4_gemm_nt((a, a_sf), (b, shifts, b_sf), d, d if add else c)


FP8_FP4_GEMM_NT = Product(
    "gemm.fp8_fp4_gemm_nt",
    Arguments,
    scratch=product.scratch,
    reference=_reference,
    cost=product.cost,
    dynamic={"a": 1, "a_sf": 1, "d": 1, "c": 1},
)


@FP8_FP4_GEMM_NT.public(reference=reference.fp8_fp4_gemm_nt, mutates=("d",))
def fp8_fp4_gemm_nt(
    a: Operand,
    b: Weights,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiplies e4m3 rows by weights in packed e2m1: `d = c + a @ b.T`.

    The weights are expanded to e4m3 in shared memory, exactly; the bits of `d` are those of
    `fp8_gemm_nt` with the expanded weights. They take half the memory. Weights that are expanded
    once by `quant.per_block_cast_lossless` give faster products on an H200. Runs on Hopper.

    Args:
        a: As in `fp8_gemm_nt`.
        b: What `prepare_fp4_weights` returns: `Fp4Weights(data, shifts, scales)`, `[N, K / 2]`,
            int8. Or the pair `(data, scales)` that it takes, which is then prepared in each call
            and makes it wait for the GPU. Or a pair of e4m3 data and scales, for which this
            function is `fp8_gemm_nt`.
        d: `[M, N]`, bfloat16 or float32, stride 1 along `N`; written and returned.
        c: Shape, dtype and strides of `d`; added in float32. May be `d` itself. None: zeros.
        recipe: None, unless `b` is e4m3.
        recipe_a: `(1, 128)`.
        recipe_b: `(1, 32)`, unless `b` is e4m3.
        compiled_dims: Ignored; for compatibility with DeepGEMM.
        disable_ue8m0_cast: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, shares memory with `d`, if weights
            cannot be prepared, or if the device is not a Hopper GPU.

    Example:
        >>> rows = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)
        >>> weights = torch.full((8, 64), 0x33, dtype=torch.int8), torch.ones(8, 4)  # 1.5
        >>> fp8_fp4_gemm_nt(rows, prepare_fp4_weights(weights), torch.empty(2, 8))[0, 0].item()
        192.0
    """
    if _is_e4m3(b):
        return fp8_gemm_nt(
            a, b, d, c, recipe, recipe_a=recipe_a, recipe_b=recipe_b, compiled_dims=compiled_dims,
            disable_ue8m0_cast=disable_ue8m0_cast,
        )  # fmt: skip
    FP8_FP4_GEMM_NT.require(_check_weights, a, b, recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    accumulate = c is not None and c is d
    FP8_FP4_GEMM_NT(*a, *_prepared(b), d, None if accumulate else c, accumulate)
    return d


# ---- groups of rows -----------------------------------------------------------------------------

_CONTIGUOUS = Kernel(_MODULE, _NAME, plan_wide)


class ContiguousArguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_shifts: Tensor
    b_sf: Tensor
    d: Tensor
    grouped_layout: Tensor
    use_psum_layout: bool

    def check(self) -> None:
        contiguous.check(self)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        return contiguous.launches(_CONTIGUOUS, self, buffers)


def _check_expected_m(value: Any) -> None:
    if value is not None:
        checks.integer("expected_m_for_psum_layout", value, 0)


def _reference_contiguous(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    shifts: Tensor,
    b_sf: Tensor,
    d: Tensor,
    layout: Tensor,
    psum: bool,
) -> None:
    reference.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (a, a_sf), (b, shifts, b_sf), d, layout, None, psum
    )


M_GROUPED_FP8_FP4_GEMM_NT_CONTIGUOUS = Product(
    "gemm.m_grouped_fp8_fp4_gemm_nt_contiguous",
    ContiguousArguments,
    scratch=product.scratch,
    reference=_reference_contiguous,
    cost=product.cost,
    dynamic={"a": 1, "a_sf": 1, "d": 1, "grouped_layout": 0},
    check_values=contiguous.check_values,
)


@M_GROUPED_FP8_FP4_GEMM_NT_CONTIGUOUS.public(
    reference=reference.m_grouped_fp8_fp4_gemm_nt_contiguous, mutates=("d",)
)
def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Operand,
    b: Weights,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiplies each row by the e2m1 weights of its group: `d[i] = a[i] @ b[grouped_layout[i]].T`.

    As `m_grouped_fp8_gemm_nt_contiguous`, with the weights and the numbers of `fp8_fp4_gemm_nt`.

    Args:
        a: As in `m_grouped_fp8_gemm_nt_contiguous`.
        b: As in `fp8_fp4_gemm_nt`, with a leading dimension of groups: `[G, N, K / 2]`, int8.
        d: `[M, N]`, bfloat16, stride 1 along `N`; written and returned. Padding rows become zero.
        grouped_layout: As in `m_grouped_fp8_gemm_nt_contiguous`.
        recipe: None, unless `b` is e4m3.
        use_psum_layout: Whether `grouped_layout` has the ends of groups.
        expected_m_for_psum_layout: Ignored; for compatibility with DeepGEMM.
        recipe_a: `(1, 128)`.
        recipe_b: `(1, 32)`, unless `b` is e4m3.
        compiled_dims: Ignored; for compatibility with DeepGEMM.
        disable_ue8m0_cast: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, shares memory with `d`, if weights
            cannot be prepared, or if the device is not a Hopper GPU.

    Example:
        >>> ones = torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(128, 1)
        >>> weights = torch.full((2, 8, 64), 0x22, dtype=torch.int8), torch.ones(2, 8, 4)
        >>> rows = torch.tensor([1] * 100 + [-1] * 28, dtype=torch.int32)
        >>> d = torch.empty(128, 8, dtype=torch.bfloat16)
        >>> b = prepare_fp4_weights(weights)
        >>> m_grouped_fp8_fp4_gemm_nt_contiguous(ones, b, d, rows)[98:102, 0].tolist()
        [128.0, 128.0, 0.0, 0.0]
    """
    if _is_e4m3(b):
        return m_grouped_fp8_gemm_nt_contiguous(
            a, b, d, grouped_layout, recipe, use_psum_layout, expected_m_for_psum_layout,
            recipe_a=recipe_a, recipe_b=recipe_b, compiled_dims=compiled_dims,
            disable_ue8m0_cast=disable_ue8m0_cast,
        )  # fmt: skip
    op = M_GROUPED_FP8_FP4_GEMM_NT_CONTIGUOUS
    op.require(_check_expected_m, expected_m_for_psum_layout)
    op.require(_check_weights, a, b, recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    op(*a, *_prepared(b), d, grouped_layout, use_psum_layout)
    return d


# ---- groups whose sizes are known on the device -------------------------------------------------

_MASKED = Kernel(_MODULE, _NAME, masked_plan)


class MaskedArguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_shifts: Tensor
    b_sf: Tensor
    d: Tensor
    masked_m: Tensor
    expected_m: int

    def check(self) -> None:
        masked.check(self)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        return masked.launches(_MASKED, self, buffers)


def _reference_masked(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    shifts: Tensor,
    b_sf: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
) -> None:
    reference.m_grouped_fp8_fp4_gemm_nt_masked(
        (a, a_sf), (b, shifts, b_sf), d, masked_m, expected_m
    )


M_GROUPED_FP8_FP4_GEMM_NT_MASKED = Product(
    "gemm.m_grouped_fp8_fp4_gemm_nt_masked",
    MaskedArguments,
    scratch=product.scratch,
    reference=_reference_masked,
    cost=masked.cost,
    check_values=masked.check_values,
)


@M_GROUPED_FP8_FP4_GEMM_NT_MASKED.public(
    reference=reference.m_grouped_fp8_fp4_gemm_nt_masked, mutates=("d",)
)
def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Operand,
    b: Weights,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiplies the first rows of each group by e2m1 weights: `d[g, :m] = a[g, :m] @ b[g].T`.

    The product of experts in decoding. As `m_grouped_fp8_gemm_nt_masked`, with the weights and the
    numbers of `fp8_fp4_gemm_nt`; `m = masked_m[g]`.

    Args:
        a: As in `m_grouped_fp8_gemm_nt_masked`.
        b: As in `fp8_fp4_gemm_nt`, with a leading dimension of groups: `[G, N, K / 2]`, int8.
        d: `[G, max_m, N]`, bfloat16, contiguous; written and returned.
        masked_m: `[G]`, int32: the rows of each group; cut to `0..max_m`.
        expected_m: About how many rows a group has, at least 1. It decides the tile size, never
            the result.
        recipe: None, unless `b` is e4m3.
        recipe_a: `(1, 128)`.
        recipe_b: `(1, 32)`, unless `b` is e4m3.
        compiled_dims: Ignored; for compatibility with DeepGEMM.
        disable_ue8m0_cast: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, shares memory with `d`, if weights
            cannot be prepared, or if the device is not a Hopper GPU.

    Example:
        >>> ones = torch.ones(1, 4, 128).to(torch.float8_e4m3fn), torch.ones(1, 4, 1)
        >>> weights = torch.full((1, 8, 64), 0x22, dtype=torch.int8), torch.ones(1, 8, 4)
        >>> d = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
        >>> sizes = torch.tensor([3], dtype=torch.int32)
        >>> b = prepare_fp4_weights(weights)
        >>> m_grouped_fp8_fp4_gemm_nt_masked(ones, b, d, sizes, 4)[0, :3, 0].tolist()
        [128.0, 128.0, 128.0]
    """
    if _is_e4m3(b):
        return m_grouped_fp8_gemm_nt_masked(
            a, b, d, masked_m, expected_m, recipe, recipe_a=recipe_a, recipe_b=recipe_b,
            compiled_dims=compiled_dims, disable_ue8m0_cast=disable_ue8m0_cast,
        )  # fmt: skip
    op = M_GROUPED_FP8_FP4_GEMM_NT_MASKED
    op.require(_check_weights, a, b, recipe, recipe_a, recipe_b, disable_ue8m0_cast)
    op(*a, *_prepared(b), d, masked_m, expected_m)
    return d
