"""`k_grouped_fp8_gemm_nt_contiguous` and `_tn_`: sums over groups of rows, for weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.gemm import operands, product
from tile_kernels.gemm.k_grouped import reference
from tile_kernels.gemm.operands import BY_ROW, Operand, Recipe
from tile_kernels.gemm.product import RESULTS, Product
from tile_kernels.gemm.tiling import BLOCK, K_GROUPED, plan_wide
from tile_kernels.runtime import backends, checks
from tile_kernels.runtime.cases import Cost, tensors_in
from tile_kernels.runtime.declaration import Host, Launch
from tile_kernels.runtime.launch import Kernel
from tile_kernels.transpose import transpose

_KERNEL = Kernel("tile_kernels.gemm.k_grouped.kernel", "k_grouped_gemm_nt", plan_wide)


class Arguments(NamedTuple):
    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_sf: Tensor
    d: Tensor
    grouped_layout: Tensor
    c: Tensor | None
    accumulate: bool
    ks: list[int] | None

    def check(self) -> None:
        operands.check_codes("a", self.a, ("M", "R"), contiguous=True)
        m, r = self.a.shape
        operands.check_codes("b", self.b, ("N", "R"), shape=(None, r), contiguous=True)
        n = self.b.shape[0]
        operands.check_columns(n)
        for name, sf, size in (("a", self.a_sf, m), ("b", self.b_sf, n)):
            dims, shape = ("R / 128", "rows"), (r // BLOCK, size)
            checks.tensor(
                f"the scales of {name}", sf, dims, torch.float32, shape=shape, contiguous=True
            )  # fmt: skip
            if size % 4:
                raise ValueError(f"{name} must have a multiple of 4 rows, got {size}")
        _check_groups(self, m, n)

    def launches(self) -> list[Launch | Host]:
        return product.launches(_KERNEL, self, K_GROUPED, self.grouped_layout, ())


def _check_groups(x: Any, m: int, n: int) -> None:
    """`d`, `c` and the sizes fit."""
    checks.tensor("d", x.d, ("G", "M", "N"))
    groups = x.d.shape[0]
    operands.check_result(x.d, x.c, ("G", "M", "N"), (groups, m, n), RESULTS, contiguous=True)
    checks.tensor(
        "grouped_layout", x.grouped_layout, ("G",), torch.int32, shape=(groups,), contiguous=True
    )
    if x.d.dtype != torch.float32 and (x.c is not None or x.accumulate):
        raise TypeError(f"d must be float32 if c is given, got {x.d.dtype}")


def check_values(x: Any) -> None:
    """Sizes are multiples of 128 that fit, and those of the host are the device's."""
    sizes, rows = x.grouped_layout, x.a.shape[1]
    checks.in_range("grouped_layout", sizes, 0, rows)
    bad = (sizes % BLOCK != 0) | (sizes.cumsum(0) > rows)
    if bad.any():
        where = int(bad.nonzero()[0])
        raise ValueError(
            f"grouped_layout must hold multiples of {BLOCK} with a sum up to {rows}, but element "
            f"[{where}] is {sizes[where].item()}"
        )
    if x.ks is not None and x.ks != sizes.tolist():
        raise ValueError(f"ks must be the sizes in grouped_layout, {sizes.tolist()}, got {x.ks}")


def cost(a: Any, b: Any, d: Tensor, grouped_layout: Tensor, c: Any = None, **_: Any) -> Cost:
    """Of sums over all rows."""
    rows = tensors_in((a,))[0].numel() // max(d.shape[1], 1)
    flops = 2 * d.shape[1] * d.shape[2] * rows
    return product.cost_of((a, b, grouped_layout, c), d, flops)


def _reference(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    c: Tensor | None,
    accumulate: bool,
    ks: list[int] | None,
) -> None:
    reference.k_grouped_fp8_gemm_nt_contiguous(
        (a, a_sf), (b, b_sf), d, ks, grouped_layout, d if accumulate else c
    )


K_GROUPED_FP8_GEMM_NT_CONTIGUOUS = Product(
    "gemm.k_grouped_fp8_gemm_nt_contiguous",
    Arguments,
    reference=_reference,
    cost=cost,
    check_values=check_values,
)


def _check_ks(ks: Any) -> None:
    if ks is not None and not isinstance(ks, (tuple, list)):
        raise TypeError(f"ks must be a list of ints or None, got {type(ks).__name__}")
    for size in ks or ():
        checks.integer("ks", size, 0)


def _compared_sizes(ks: Sequence[int] | None) -> list[int] | None:
    """The sizes where the checked mode compares them; else they would be part of the cache key."""
    if ks is None or torch.compiler.is_compiling() or not backends.is_checked():
        return None
    return list(ks)


def _check_arguments(a: Any, b: Any, d: Any, ks: Any, recipe: Any, dims: int) -> None:
    operands.check_operands(a, b, None, None, None)
    if recipe is not BY_ROW:
        operands.check_recipe(recipe, None, None, (BY_ROW,))
    if ks is not None:
        _check_ks(ks)
    flat = [name for name, (data, _) in (("a", a), ("b", b)) if data.dim() == 1]
    if flat and (ks is None or dims == 1):
        raise ValueError(f"{flat[0]} must have 2 dimensions unless ks is given, got 1")
    if flat:
        checks.tensor("d", d, ("G", "M", "N"))
        for name, (data, _), rows in (("a", a, d.shape[1]), ("b", b, d.shape[2])):
            if data.dim() == 1 and data.numel() != rows * sum(ks):
                raise ValueError(
                    f"{name} must have {rows} x {sum(ks)} elements, got {data.numel()}"
                )


def _matrix(operand: Operand, rows: int, ks: Any) -> Operand:
    """Data as one matrix, and scales as `[steps, rows]`."""
    data, sf = operand
    if data.dim() == 1:
        data = reference.joined(data, rows, ks)
    if isinstance(sf, Tensor) and sf.dim() == 2 and not sf.is_contiguous() and sf.T.is_contiguous():
        sf = sf.T
    return data, sf


@K_GROUPED_FP8_GEMM_NT_CONTIGUOUS.public(
    reference=reference.k_grouped_fp8_gemm_nt_contiguous, mutates=("d",)
)
def k_grouped_fp8_gemm_nt_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    ks: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = BY_ROW,
    *,
    compiled_dims: str | None = None,  # noqa: ARG001
) -> Tensor:
    """Sums products over the rows of each group: `d[g] = c[g] + a[:, rows] @ b[:, rows].T`.

    This product computes the weight gradients of experts. The rows of a group are contiguous, and
    their number is a multiple of 128. The result of a group without rows is `c[g]`, or zeros. The
    sizes are read on the device, so the host does not wait. Values are rounded and accumulated as
    in `fp8_gemm_nt` with recipe `(1, 1, 128)`.

    Args:
        a: `(data, scales)`: `[M, R]`, float8_e4m3fn, contiguous, and `[R / 128, M]`, float32,
            contiguous, as `quant.per_channel_cast_and_transpose(x, "e4m3", 128)` returns them; the
            transposed view of the scales is accepted too. `M` is a multiple of 4. Or data of one
            dimension, one `[M, k]` matrix for each `k` of `ks`, which is copied first.
        b: `(data, scales)`: `[N, R]` and `[R / 128, N]`, likewise; `N` is a multiple of 8.
        d: `[G, M, N]`, float32, or bfloat16 without `c`, contiguous; written and returned.
        ks: The sizes of groups on the host, or None. Only data of one dimension needs them; the
            checked mode compares them with `grouped_layout`.
        grouped_layout: `[G]`, int32, contiguous: the rows of each group, such as
            `num_tokens_per_expert` of `moe.get_fused_mapping(..., alignment=128)`. Rows behind the
            last group are not read.
        c: Shape and dtype of `d`; added in float32. May be `d` itself. None: zeros.
        recipe: `(1, 1, 128)`.
        compiled_dims: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> x = torch.ones(8, 256).to(torch.float8_e4m3fn), torch.ones(2, 8)
        >>> sizes = torch.tensor([0, 128], dtype=torch.int32)
        >>> d = k_grouped_fp8_gemm_nt_contiguous(x, x, torch.empty(2, 8, 8), None, sizes)
        >>> d[:, 0, 0].tolist()
        [0.0, 128.0]
    """
    operator = K_GROUPED_FP8_GEMM_NT_CONTIGUOUS
    operator.require(_check_arguments, a, b, d, ks, recipe, 2)
    if a[0].dim() == 1 or b[0].dim() == 1:
        a, b = _matrix(a, d.shape[1], ks), _matrix(b, d.shape[2], ks)
    else:
        a, b = _matrix(a, 0, None), _matrix(b, 0, None)
    accumulate = c is not None and c is d
    added = None if accumulate else c
    operator(*a, *b, d, grouped_layout, added, accumulate, _compared_sizes(ks))
    return d


def k_grouped_fp8_gemm_tn_contiguous(
    a: Operand,
    b: Operand,
    d: Tensor,
    ks: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = BY_ROW,
    *,
    compiled_dims: str | None = None,
) -> Tensor:
    """Computes `k_grouped_fp8_gemm_nt_contiguous` of operands that are stored by rows.

    The tensor cores of Hopper multiply e4m3 along contiguous channels only. Both operands are
    therefore transposed first by `transpose.transpose`, one launch each.
    `quant.per_channel_cast_and_transpose` avoids that.

    Args:
        a: `(data, scales)`: `[R, M]` e4m3 and `[R / 128, M]`, as `quant.per_channel_cast(x, "e4m3",
            128)` returns them.
        b: `(data, scales)`: `[R, N]` e4m3 and `[R / 128, N]`.
        d: `[num_groups, M, N]`: receives the result.
        ks: The rows of each group on the host, or None.
        grouped_layout: The rows of each group on the device, int32 `[num_groups]`.
        c: An addend of the shape, dtype and strides of `d`, or None.
        recipe: As in `k_grouped_fp8_gemm_nt_contiguous`.
        compiled_dims: As in `k_grouped_fp8_gemm_nt_contiguous`.

    Returns:
        `d`.

    Example:
        >>> x = torch.ones(256, 8).to(torch.float8_e4m3fn), torch.ones(2, 8)
        >>> sizes = torch.tensor([0, 128], dtype=torch.int32)
        >>> d = k_grouped_fp8_gemm_tn_contiguous(x, x, torch.empty(2, 8, 8), None, sizes)
        >>> d[:, 0, 0].tolist()
        [0.0, 128.0]
    """
    with checks.named("k_grouped_fp8_gemm_tn_contiguous"):
        _check_arguments(a, b, d, ks, recipe, 1)
        for name, (data, _) in (("a", a), ("b", b)):
            checks.tensor(name, data, ("R", "rows"), torch.float8_e4m3fn)
    left, right = ((transpose(data), sf) for data, sf in (a, b))
    return k_grouped_fp8_gemm_nt_contiguous(
        left, right, d, ks, grouped_layout, c, recipe, compiled_dims=compiled_dims
    )


# ---- bfloat16 -----------------------------------------------------------------------------------


class PlainArguments(NamedTuple):
    """`a` and `b` are transposed already: `[M, R]` and `[N, R]`."""

    a: Tensor
    b: Tensor
    d: Tensor
    grouped_layout: Tensor
    c: Tensor | None
    accumulate: bool
    ks: list[int] | None

    def check(self) -> None:
        checks.tensor("a", self.a, ("M", "R"), torch.bfloat16, contiguous=True)
        m, r = self.a.shape
        if r % BLOCK:
            raise ValueError(f"a must have a multiple of {BLOCK} rows, got {r}")
        checks.tensor("b", self.b, ("N", "R"), torch.bfloat16, shape=(None, r), contiguous=True)
        operands.check_columns(self.b.shape[0])
        _check_groups(self, m, self.b.shape[0])

    def launches(self) -> list[Launch | Host]:
        return product.launches(_KERNEL, self, K_GROUPED, self.grouped_layout, ())


def _check_matrices(a: Any, b: Any, ks: Any, d: Any, layout: Any, c: Any, accumulate: bool) -> None:
    """Everything that would be found after the transpositions."""
    checks.tensor("a", a, ("R", "M"), torch.bfloat16, contiguous=True)
    r, m = a.shape
    if r % BLOCK:
        raise ValueError(f"a must have a multiple of {BLOCK} rows, got {r}")
    checks.tensor("b", b, ("R", "N"), torch.bfloat16, shape=(r, None), contiguous=True)
    _check_ks(ks)
    operands.check_columns(b.shape[1])
    given = PlainArguments(a, b, d, layout, c, accumulate, ks)
    _check_groups(given, m, b.shape[1])
    for name, tensor in given._asdict().items():
        if isinstance(tensor, Tensor) and tensor.device != a.device:
            raise ValueError(f"{name} must be on {a.device} like a, got {tensor.device}")


def _reference_bf16(
    a: Tensor, b: Tensor, d: Tensor, layout: Tensor, c: Any, accumulate: bool, ks: Any
) -> None:
    added = d if accumulate else c
    reference.k_grouped_bf16_gemm_tn_contiguous(a.mT, b.mT, d, ks, layout, added)


K_GROUPED_BF16_GEMM_TN_CONTIGUOUS = Product(
    "gemm.k_grouped_bf16_gemm_tn_contiguous",
    PlainArguments,
    reference=_reference_bf16,
    cost=cost,
    check_values=check_values,
)


@K_GROUPED_BF16_GEMM_TN_CONTIGUOUS.public(
    reference=reference.k_grouped_bf16_gemm_tn_contiguous, mutates=("d",)
)
def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    *,
    compiled_dims: str | None = None,  # noqa: ARG001
) -> Tensor:
    """Sums products over the rows of each group: `d[g] = c[g] + a[rows].T @ b[rows]`.

    As `k_grouped_fp8_gemm_nt_contiguous`, with the numbers of `bf16_gemm_nt`. Both operands are
    transposed first.

    Args:
        a: `[R, M]`, bfloat16, contiguous; `R` is a multiple of 128.
        b: `[R, N]`, bfloat16, contiguous; `N` is a multiple of 8.
        d: `[G, M, N]`, float32, or bfloat16 without `c`, contiguous; written and returned.
        ks: The sizes of groups on the host, or None; compared with `grouped_layout` in the checked
            mode only.
        grouped_layout: As in `k_grouped_fp8_gemm_nt_contiguous`.
        c: Shape and dtype of `d`; added in float32. May be `d` itself. None: zeros.
        compiled_dims: Ignored; for compatibility with DeepGEMM.

    Returns:
        `d`. Errors are those of `fp8_gemm_nt`.

    Example:
        >>> x, sizes = torch.ones(256, 8).bfloat16(), torch.tensor([0, 128], dtype=torch.int32)
        >>> d = k_grouped_bf16_gemm_tn_contiguous(x, x, torch.empty(2, 8, 8), None, sizes)
        >>> d[:, 0, 0].tolist()
        [0.0, 128.0]
    """
    operator = K_GROUPED_BF16_GEMM_TN_CONTIGUOUS
    accumulate = c is not None and c is d
    rest = d, grouped_layout, None if accumulate else c, accumulate
    operator.require(_check_matrices, a, b, ks, *rest)
    operator(transpose(a), transpose(b), *rest, _compared_sizes(ks))
    return d
