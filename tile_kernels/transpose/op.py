"""`transpose` and `batched_transpose`: bit copies between the two layouts of a matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.transpose import reference
from tile_kernels.transpose.plan import plan

_KERNEL = Kernel("tile_kernels.transpose.kernel", "batched_transpose", plan)

# The kernel moves bits. The usual dtypes have their own kernels, because viewing two tensors as
# another dtype costs a tenth of a call; the rest are viewed as integers of their width.
_NATIVE = {
    getattr(torch, name): name
    for name in (
        "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8",
        "int16", "int32", "int64", "uint8",
    )
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MAX_BATCHES = 65535  # the limit of the grid's third dimension


class Arguments(NamedTuple):
    x: Tensor

    def check(self) -> None:
        _check(("rows", "cols"), self)

    def outputs(self) -> Out:
        *batch, rows, cols = self.x.shape
        return Out("out", (*batch, cols, rows), self.x.dtype)

    def launches(self, out: Spec) -> list[Launch]:
        x: Any = self.x
        if x.numel() == 0:
            return []
        width = x.element_size()
        rows = Size(lambda a: a.x.shape[-2])
        sizes = (width, rows, x.shape[-1], x.stride(-2), x.stride(0) if x.dim() == 3 else None)
        if x.stride(-1) != 1:  # a single column: its stride is irrelevant and may be anything
            x = x.apply(_unit_inner_stride)
        if x.dtype not in _NATIVE:
            x, out = x.view(_BITS[width]), out.view(_BITS[width])
        problem = (_NATIVE[x.dtype], *sizes, alignment(x))
        if x.dim() == 2 or x.shape[0] <= _MAX_BATCHES:
            return [Launch(_KERNEL, problem, (x, out))]
        parts = [
            (first, min(_MAX_BATCHES, x.shape[0] - first))
            for first in range(0, x.shape[0], _MAX_BATCHES)
        ]
        return [
            Launch(_KERNEL, problem, tuple(t.apply(Tensor.narrow, 0, *part) for t in (x, out)))
            for part in parts
        ]


def _check(dims: tuple[str, ...], a: Arguments) -> None:
    checks.tensor("x", a.x, dims, unit_inner_stride=True)
    if a.x.element_size() not in _BITS:
        raise TypeError(f"x must have elements of 1, 2, 4 or 8 bytes, got {a.x.dtype}")


def check_batched_transpose(a: Arguments) -> None:
    _check(("batch", "rows", "cols"), a)


def _unit_inner_stride(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, (*x.stride()[:-1], 1))


def cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * x.numel() * x.element_size())


# A gradient may be expanded, as that of a sum is.
def _backward(_: Any, grad: Tensor) -> Tensor:
    return transpose(grad.contiguous())


def _batched_backward(_: Any, grad: Tensor) -> Tensor:
    return batched_transpose(grad.contiguous())


TRANSPOSE = Operator(
    "transpose.transpose",
    Arguments,
    reference=reference.transpose,
    cost=cost,
    dynamic={"x": 1},
    backward=_backward,
)

BATCHED_TRANSPOSE = Operator(
    "transpose.batched_transpose",
    Arguments,
    check=check_batched_transpose,
    reference=reference.batched_transpose,
    cost=cost,
    backward=_batched_backward,
)


@TRANSPOSE.public()
def transpose(x: Tensor) -> Tensor:
    """Transposes a matrix: `out[j, i] = x[i, j]`, bit for bit.

    Any sizes are allowed, zero included. Fastest (16-byte accesses) when rows start on 16-byte
    boundaries and `rows` fills a multiple of 16 bytes.

    Args:
        x: `[rows, cols]`, any dtype of 1, 2, 4 or 8 bytes, any row stride.

    Returns:
        `[cols, rows]`, dtype of `x`, contiguous.

    Raises:
        TypeError: If the elements have another width.
        ValueError: If `x` has another rank or an inner stride other than 1.

    Example:
        >>> transpose(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist()
        [[1, 4], [2, 5], [3, 6]]
    """
    return TRANSPOSE(x)


@BATCHED_TRANSPOSE.public()
def batched_transpose(x: Tensor) -> Tensor:
    """Transposes each matrix of a batch: `out[b, j, i] = x[b, i, j]`, bit for bit.

    Any sizes are allowed, zero included; fastest as for `transpose`.

    Args:
        x: `[batch, rows, cols]`, any dtype of 1, 2, 4 or 8 bytes, `stride(2) == 1`.

    Returns:
        `[batch, cols, rows]`, dtype of `x`, contiguous.

    Raises:
        TypeError: If the elements have another width.
        ValueError: If `x` has another rank or an inner stride other than 1.

    Example:
        >>> batched_transpose(torch.arange(4).view(1, 2, 2)).tolist()
        [[[0, 2], [1, 3]]]
    """
    return BATCHED_TRANSPOSE(x)
