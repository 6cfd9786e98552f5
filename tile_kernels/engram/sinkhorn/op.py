"""The steps of an optimizer of embedding tables: momentum, scaled rows and columns in turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.sinkhorn import reference
from tile_kernels.engram.sinkhorn.plan import (
    MAX_COLUMNS,
    PARTS,
    plan_columns,
    plan_momentum,
    plan_rows,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MODULE = "tile_kernels.engram.sinkhorn.kernel"
_MOMENTUM = Kernel(_MODULE, "momentum", plan_momentum)
_STEP = Kernel(_MODULE, "step", plan_rows)
_REDUCE = Kernel(_MODULE, "step_reduce", plan_columns)
_FINALIZE = Kernel(_MODULE, "finalize", plan_rows)

_FLOATS = (torch.bfloat16, torch.float32)


# ---- momentum -----------------------------------------------------------------------------------


class MomentumArguments(NamedTuple):
    grad: Tensor
    momentum_buffer: Tensor
    beta1: float
    nesterov: bool

    def check(self) -> None:
        for name, value in zip(self._fields, self[:2]):
            dims = ("...",) * (value.dim() if isinstance(value, Tensor) else 1)
            checks.tensor(name, value, dims, _FLOATS, contiguous=True)
            checks.countable(name, value)
        if self.grad.shape != self.momentum_buffer.shape:
            raise ValueError(
                f"momentum_buffer must have the shape of grad, {tuple(self.grad.shape)}, got "
                f"{tuple(self.momentum_buffer.shape)}"
            )
        if not 0 <= checks.number("beta1", self.beta1) <= 1:
            raise ValueError(f"beta1 must be in 0..1, got {self.beta1}")
        checks.boolean("nesterov", self.nesterov)

    def outputs(self) -> Out:
        return Out("out", self.grad.shape, torch.float32)

    def launches(self, out: Spec) -> Launch | None:
        if self.grad.numel() == 0:
            return None
        grad, buffer = self.grad, self.momentum_buffer
        problem = (
            grad.numel(), dtype_name(grad), dtype_name(buffer), self.nesterov,
            alignment(grad, buffer, out),
        )  # fmt: skip
        arguments = (
            grad.view(-1),
            buffer.view(-1),
            out.view(-1),
            float(self.beta1),
            1 - float(self.beta1),
        )
        return Launch(_MOMENTUM, problem, arguments)


def momentum_cost(grad: Tensor, momentum_buffer: Tensor, **_: Any) -> Cost:
    per_element = grad.element_size() + 2 * momentum_buffer.element_size() + 4
    return Cost(bytes=grad.numel() * per_element)


MOMENTUM_UPDATE = Operator(
    "engram.engram_sinkhorn_momentum_update",
    MomentumArguments,
    reference=reference.engram_sinkhorn_momentum_update,
    cost=momentum_cost,
    mutates=("momentum_buffer",),
    out=("out",),
)


@MOMENTUM_UPDATE.public()
def engram_sinkhorn_momentum_update(
    grad: Tensor,
    momentum_buffer: Tensor,
    beta1: float,
    nesterov: bool = True,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Adds a gradient to its momentum, in place, and returns the matrix of the update.

    `M = fma(old, beta1, (1 - beta1) * g)` in float32; the buffer receives `M` in its dtype, and the
    result is `fma(g, 1 - beta1, beta1 * M)`, or `M` without `nesterov`. Not differentiable.

    Args:
        grad: Any shape, bfloat16 or float32, contiguous; fewer than 2**31 elements.
        momentum_buffer: Like `grad`, bfloat16 or float32; written in place.
        beta1: The share of the old momentum, in 0 to 1.
        nesterov: Whether the result looks a step ahead.
        out: A buffer for the result, which is filled and returned.

    Returns:
        Shape of `grad`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or `beta1` is out of range.

    Example:
        >>> buffer = torch.tensor([0.5, 1.0])
        >>> engram_sinkhorn_momentum_update(torch.tensor([1.0, -2.0]), buffer, 0.9), buffer
        (tensor([0.5950, 0.4300]), tensor([0.5500, 0.7000]))
    """
    return MOMENTUM_UPDATE(grad, momentum_buffer, beta1, nesterov, out=out)


# ---- rows ---------------------------------------------------------------------------------------


def _check_matrix(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float) -> None:
    checks.tensor("matrix", matrix, ("rows", "columns"), torch.float32, contiguous=True)
    rows, columns = matrix.shape
    if not 1 <= columns <= MAX_COLUMNS:
        raise ValueError(f"matrix must have 1..{MAX_COLUMNS} columns, got {columns}")
    for name, scale, size in (("row_scale", row_scale, rows), ("col_scale", col_scale, columns)):
        checks.tensor(name, scale, ("size",), torch.float32, shape=(size,), contiguous=True)
    checks.epsilon("eps", eps)


class StepArguments(NamedTuple):
    matrix: Tensor
    row_scale: Tensor
    col_scale: Tensor
    eps: float

    def check(self) -> None:
        _check_matrix(*self)

    def outputs(self) -> tuple[Out, Out]:
        rows, columns = self.matrix.shape
        return (
            Out("out", (rows,), torch.float32),
            Out("col_sumsq_partial", (PARTS, columns), torch.float32),
        )

    def launches(self, row_norm: Spec, partial: Spec) -> Launch | Host:
        if self.matrix.numel() == 0:
            return Host(Tensor.zero_, (partial,))
        problem = (self.matrix.shape[1], alignment(self.matrix, self.col_scale))
        return Launch(_STEP, problem, (*self[:3], row_norm, partial, float(self.eps)))


def step_cost(matrix: Tensor, **_: Any) -> Cost:
    """Every element once, three numbers for each row, and the parts."""
    rows, columns = matrix.shape
    return Cost(bytes=4 * matrix.numel() + 12 * rows + 4 * (PARTS + 1) * columns)


STEP = Operator(
    "engram.engram_sinkhorn_step",
    StepArguments,
    reference=reference.engram_sinkhorn_step,
    cost=step_cost,
    mutates=("row_scale",),
    dynamic={"matrix": 1, "row_scale": 0},
    out=("out", "col_sumsq_partial"),
)


def _public_step(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float) -> Any:
    return reference.engram_sinkhorn_step(matrix, row_scale, col_scale, eps)


@STEP.public(reference=_public_step)
def engram_sinkhorn_step(
    matrix: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    eps: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scales the rows of `x = (row_scale * matrix) * col_scale` to norm 1; the matrix is only read.

    `row_scale` is multiplied by `1 / (norm + eps)` in place. A row of zeros keeps its scale: rows
    of a table that no token looked up would get a larger one at every step, and then NaN. Sums of
    squares of the columns of the new `x` come in parts of neighbouring rows, always as many, for
    `engram_sinkhorn_step_reduce`. Not differentiable.

    Args:
        matrix: `[rows, columns]`, float32, contiguous; up to 2048 columns.
        row_scale: `[rows]`, float32, contiguous; written in place.
        col_scale: `[columns]`, float32, contiguous.
        eps: Added to norms; finite and not negative.
        out: Buffers for the results, which are filled and returned.

    Returns:
        `(row_norm, col_sumsq_partial)`: `[rows]`, the norms before; `[512, columns]`; float32.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or `eps` is out of range.

    Example:
        >>> matrix, scale = torch.tensor([[3.0, -4.0], [0.0, 0.0]]), torch.ones(2)
        >>> norms, partial = engram_sinkhorn_step(matrix, scale, torch.ones(2), 0.0)
        >>> norms, scale
        (tensor([5., 0.]), tensor([0.2000, 1.0000]))
    """
    return STEP(matrix, row_scale, col_scale, eps, out=out)


class ReduceArguments(NamedTuple):
    col_sumsq_partial: Tensor
    col_sumsq: Tensor

    def check(self) -> None:
        dims = ("parts", "columns")
        checks.tensor(
            "col_sumsq_partial", self.col_sumsq_partial, dims, torch.float32, contiguous=True
        )
        checks.tensor(
            "col_sumsq", self.col_sumsq, dims[1:], torch.float32,
            shape=tuple(self.col_sumsq_partial.shape[1:]), contiguous=True,
        )  # fmt: skip

    def outputs(self) -> None:
        return None

    def launches(self) -> Launch | Host | None:
        if self.col_sumsq.numel() == 0:
            return None
        if self.col_sumsq_partial.numel() == 0:
            return Host(Tensor.zero_, (self.col_sumsq,))
        return Launch(_REDUCE, (self.col_sumsq.shape[0],), tuple(self))


REDUCE = Operator(
    "engram.engram_sinkhorn_step_reduce",
    ReduceArguments,
    reference=reference.engram_sinkhorn_step_reduce,
    cost=lambda col_sumsq_partial, col_sumsq: Cost(
        bytes=4 * (col_sumsq_partial.numel() + col_sumsq.numel())
    ),
    mutates=("col_sumsq",),
    differentiable=False,
)


@REDUCE.public()
def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Adds the partial sums of `engram_sinkhorn_step`, in their order.

    Args:
        col_sumsq_partial: `[parts, columns]`, float32, contiguous.
        col_sumsq: `[columns]`, float32, contiguous; overwritten.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> sums = torch.empty(2)
        >>> engram_sinkhorn_step_reduce(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), sums)
        >>> sums
        tensor([4., 6.])
    """
    REDUCE(col_sumsq_partial, col_sumsq)


class FinalizeArguments(NamedTuple):
    matrix: Tensor
    row_scale: Tensor
    col_scale: Tensor
    eps: float
    alpha: float

    def check(self) -> None:
        _check_matrix(*self[:4])
        checks.finite("alpha", self.alpha)

    def outputs(self) -> Out:
        return Out("out", self.matrix.shape, torch.float32)

    def launches(self, out: Spec) -> Launch | None:
        if self.matrix.numel() == 0:
            return None
        problem = (self.matrix.shape[1], alignment(self.matrix, self.col_scale, out))
        return Launch(_FINALIZE, problem, (*self[:3], out, float(self.eps), float(self.alpha)))


FINALIZE = Operator(
    "engram.engram_sinkhorn_finalize",
    FinalizeArguments,
    reference=reference.engram_sinkhorn_finalize,
    cost=lambda matrix, **_: Cost(bytes=8 * matrix.numel() + 4 * matrix.shape[0]),
    dynamic={"matrix": 1, "row_scale": 0},
    out=("out",),
    in_place=("matrix",),
)


@FINALIZE.public()
def engram_sinkhorn_finalize(
    matrix: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    eps: float,
    alpha: float,
    out: Tensor | None = None,
) -> Tensor:
    """The update: `x = (row_scale * matrix) * col_scale` with rows of norm `alpha`.

    `x * (alpha / (norm + eps))`; rows of zeros stay zeros. Not differentiable.

    Args:
        matrix, row_scale, col_scale, eps: As in `engram_sinkhorn_step`.
        alpha: The norm of the rows.
        out: A buffer for the result, which may be `matrix`; it is filled and returned.

    Returns:
        `[rows, columns]`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> matrix = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
        >>> engram_sinkhorn_finalize(matrix, torch.ones(2), torch.ones(2), 0.0, 10.0)
        tensor([[ 6., -8.],
                [ 0.,  0.]])
    """
    return FINALIZE(matrix, row_scale, col_scale, eps, alpha, out=out)
