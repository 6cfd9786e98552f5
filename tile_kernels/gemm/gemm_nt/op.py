"""`fp8_gemm_nt` and its transposed forms: products of two matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tile_kernels.gemm import operands, product, scales
from tile_kernels.gemm.gemm_nt import reference
from tile_kernels.gemm.gemm_nt.plan import plan
from tile_kernels.gemm.operands import Operand, Recipe
from tile_kernels.gemm.product import Product
from tile_kernels.gemm.tiling import BLOCK, DENSE
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Host, Launch, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.transpose import transpose

_KERNEL = Kernel("tile_kernels.gemm.gemm_nt.kernel", "gemm_nt", plan)
_NUM_ROWS = Size(lambda x: x.a.shape[0])


class Arguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_sf: Tensor
    d: Tensor
    c: Tensor | None
    accumulate: bool
    rows_per_scale: int

    def check(self) -> None:
        product.check(self, DENSE)

    def launches(self, *buffers: Spec) -> list[Launch | Host]:
        return product.launches(_KERNEL, self, DENSE, None, buffers, _NUM_ROWS)


def _reference(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, d: Tensor, c: Any, accumulate: bool, rows: int
) -> None:
    recipe = (1, rows, BLOCK)
    reference.fp8_gemm_nt((a, a_sf), (b, b_sf), d, d if accumulate else c, recipe)


FP8_GEMM_NT = Product(
    "gemm.fp8_gemm_nt",
    Arguments,
    scratch=product.scratch,
    reference=_reference,
    cost=product.cost,
    dynamic={"a": 1, "a_sf": 1, "d": 1, "c": 1},
)


@FP8_GEMM_NT.public(reference=reference.fp8_gemm_nt, mutates=("d",))
def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,  # noqa: ARG001
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiplies two e4m3 matrices with scales: `d = c + a @ b.T`.

    Products of 128 channels come from the tensor cores; each is multiplied by its two scales and
    added in float32, in ascending order. The bits of a row of `d` do not depend on other rows, on
    the number of rows or on the SM budget. Row-major scales of rows cost one small launch more.
    Runs on Hopper.

    Args:
        a: `(data, scales)`: `[M, K]`, float8_e4m3fn, stride 1 along `K`, and `[M, K / 128]`,
            float32, MN-major (strides `(1, align(M, 4))`) or contiguous; or int32 exponents
            `[M, ceil(K / 512)]`, four in a word. What `quant.per_token_cast(x, "e4m3", 128)`
            returns. `K` is a multiple of 128.
        b: `(data, scales)`: `[N, K]`, float8_e4m3fn, contiguous, and `[ceil(N / 128), K / 128]`,
            contiguous or so after a transposition, what `quant.per_block_cast` returns; with recipe
            `(1, 1, 128)` scales of rows, like those of `a`. `N` is a multiple of 8.
        d: `[M, N]`, bfloat16 or float32, stride 1 along `N`; written and returned.
        c: Shape, dtype and strides of `d`; added in float32. May be `d` itself. None: zeros.
        recipe: `(1, 128, 128)` (default) or `(1, 1, 128)`: rows of `a` and of `b` that share a
            scale, and channels.
        recipe_a: `(1, 128)`, in place of `recipe`.
        recipe_b: `(128, 128)` or `(1, 128)`, in place of `recipe`.
        compiled_dims: Ignored; for compatibility with DeepGEMM.
        disable_ue8m0_cast: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, shares memory with `d`, or if the
            device is not a Hopper GPU.

    Example:
        >>> import torch
        >>> ones = torch.ones(2, 128).to(torch.float8_e4m3fn)
        >>> weights = torch.ones(8, 128).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
        >>> fp8_gemm_nt((ones, torch.ones(2, 1)), weights, torch.empty(2, 8))[0, 0].item()
        64.0
    """
    FP8_GEMM_NT.require(
        operands.check_operands, a, b, recipe, recipe_a, recipe_b, disable_ue8m0_cast
    )
    rows = operands.rows_per_scale(recipe, recipe_b)
    accumulate = c is not None and c is d
    FP8_GEMM_NT(*a, *b, d, None if accumulate else c, accumulate, rows)
    return d


def _k_major(operand: Operand) -> Operand:
    """`[K, rows]` with scales `[steps, ...]` as `[rows, K]`; copied unless it lies so in memory."""
    data, sf = operand
    by_rows = sf.shape[1] == data.shape[1]
    transposed = sf.T.contiguous() if by_rows and not scales.is_mn_major(sf.T) else sf.T
    return data.T if data.T.is_contiguous() else transpose(data), transposed


def _swapped(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> tuple[Operand, Operand]:
    for name, operand in (("a", a), ("b", b)):
        operands.check_pair(name, operand)
        for part in operand:
            checks.tensor(name, part, ("rows", "columns"))
    return _k_major(a) if transpose_a else a, _k_major(b) if transpose_b else b


def fp8_gemm_nn(a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, **more: Any) -> Tensor:
    """Computes `d = c + a @ b`.

    The tensor cores of Hopper multiply e4m3 along contiguous channels only. `b` is therefore
    transposed by one launch, unless it is a transposed view of a contiguous `[N, K]`.

    Args:
        a: `(data, scales)` with `data` `[M, K]`, as in `fp8_gemm_nt`.
        b: `(data, scales)` with `data` `[K, N]` and `scales` `[K / 128, ...]`.
        d: `[M, N]`, bfloat16 or float32: receives the result.
        c: An addend of the shape, dtype and strides of `d`, or None.
        more: The other arguments of `fp8_gemm_nt`.

    Returns:
        `d`.
    """
    with checks.named("fp8_gemm_nn"):
        a, b = _swapped(a, b, False, True)
    return fp8_gemm_nt(a, b, d, c, **more)


def fp8_gemm_tn(a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, **more: Any) -> Tensor:
    """Computes `d = c + a.T @ b`.

    Both operands are transposed; see `fp8_gemm_nn` for the cost.

    Args:
        a: `(data, scales)` with `data` `[K, M]` and `scales` `[K / 128, ...]`.
        b: `(data, scales)` with `data` `[K, N]` and `scales` `[K / 128, ...]`.
        d: `[M, N]`, bfloat16 or float32: receives the result.
        c: An addend of the shape, dtype and strides of `d`, or None.
        more: The other arguments of `fp8_gemm_nt`.

    Returns:
        `d`.
    """
    with checks.named("fp8_gemm_tn"):
        a, b = _swapped(a, b, True, True)
    return fp8_gemm_nt(a, b, d, c, **more)


def fp8_gemm_tt(a: Operand, b: Operand, d: Tensor, c: Tensor | None = None, **more: Any) -> Tensor:
    """Computes `d = c + a.T @ b.T`.

    `a` is transposed; see `fp8_gemm_nn` for the cost.

    Args:
        a: `(data, scales)` with `data` `[K, M]` and `scales` `[K / 128, M]`.
        b: `(data, scales)` with `data` `[N, K]`, as in `fp8_gemm_nt`.
        d: `[M, N]`, bfloat16 or float32: receives the result.
        c: An addend of the shape, dtype and strides of `d`, or None.
        more: The other arguments of `fp8_gemm_nt`.

    Returns:
        `d`.
    """
    with checks.named("fp8_gemm_tt"):
        a, b = _swapped(a, b, True, False)
    return fp8_gemm_nt(a, b, d, c, **more)


# ---- bfloat16 -----------------------------------------------------------------------------------


class PlainArguments(NamedTuple):
    a: Tensor
    b: Tensor
    d: Tensor
    c: Tensor | None
    accumulate: bool

    def check(self) -> None:
        product.check(self, DENSE)

    def launches(self) -> list[Launch | Host]:
        return product.launches(_KERNEL, self, DENSE, None, (), _NUM_ROWS)


def _reference_bf16(a: Tensor, b: Tensor, d: Tensor, c: Any, accumulate: bool) -> None:
    reference.bf16_gemm_nt(a, b, d, d if accumulate else c)


BF16_GEMM_NT = Product(
    "gemm.bf16_gemm_nt",
    PlainArguments,
    reference=_reference_bf16,
    cost=product.cost,
    dynamic={"a": 1, "d": 1, "c": 1},
)


@BF16_GEMM_NT.public(reference=reference.bf16_gemm_nt, mutates=("d",))
def bf16_gemm_nt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    *,
    compiled_dims: str | None = None,  # noqa: ARG001
) -> Tensor:
    """Multiplies two bfloat16 matrices: `d = c + a @ b.T`, summed in float32.

    Steps of 64 channels are added in ascending order by one block, so that the bits of a row of `d`
    do not depend on other rows. Runs on Hopper.

    Args:
        a: `[M, K]`, bfloat16, stride 1 along `K`, which is a multiple of 8.
        b: `[N, K]`, bfloat16, contiguous; `N` is a multiple of 8.
        d: `[M, N]`, bfloat16 or float32, stride 1 along `N`; written and returned.
        c: Shape, dtype and strides of `d`; added in float32. May be `d` itself. None: zeros.
        compiled_dims: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> import torch
        >>> ones = torch.ones(8, 16).bfloat16()
        >>> bf16_gemm_nt(ones, ones, torch.empty(8, 8))[0, 0].item()
        16.0
    """
    accumulate = c is not None and c is d
    BF16_GEMM_NT(a, b, d, None if accumulate else c, accumulate)
    return d
