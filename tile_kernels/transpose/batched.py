"""`transpose` and `batched_transpose`: pure bit copies between the two layouts of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.transpose.cases import BATCHED_TRANSPOSE, TRANSPOSE

_KERNEL = Kernel("tile_kernels.transpose.kernels.batched", "batched_transpose")

# The kernel moves bits. The usual dtypes have kernels of their own, because viewing two tensors as
# another dtype costs a tenth of a call; the rest are viewed as integers of their width.
_NATIVE = {
    getattr(torch, name): name
    for name in (
        "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8",
        "int16", "int32", "int64", "uint8",
    )
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MOST_BATCHES = 65535  # the limit of the grid's third dimension


def _check_dtype(x: Tensor) -> None:
    if x.element_size() not in _BITS:
        raise TypeError(f"x must have elements of 1, 2, 4 or 8 bytes, got {x.dtype}")


def _check_transpose(x: Tensor) -> None:
    checks.tensor("x", x, ("rows", "cols"), unit_inner_stride=True)
    _check_dtype(x)


def _check_batched_transpose(x: Tensor) -> None:
    checks.tensor("x", x, ("batch", "rows", "cols"), unit_inner_stride=True)
    _check_dtype(x)


def _cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * x.numel() * x.element_size())


def _launch(x: Tensor, out: Tensor, batch: int = 1, batch_stride: int | None = None) -> None:
    """Transpose `[rows, cols]` or `[batch, rows, cols]` into the contiguous `out`."""
    if not nonempty(x):
        return
    rows, cols = x.shape[-2:]
    row_stride = x.stride(-2)
    if x.stride(-1) != 1:  # a single column: the stride means nothing and may be anything
        x = x.as_strided(x.shape, (*x.stride()[:-1], 1))
    dtype = _NATIVE.get(x.dtype)
    width = x.element_size()
    if dtype is None:
        bits = _BITS[width]
        x, out, dtype = x.view(bits), out.view(bits), _NATIVE[bits]
    problem = (dtype, width, rows, cols, row_stride, batch_stride, alignment(x))
    if isinstance(batch, int) and batch > _MOST_BATCHES:
        for x_part, out_part in zip(x.split(_MOST_BATCHES), out.split(_MOST_BATCHES)):
            _KERNEL.launch(problem, x_part, out_part)
    else:
        _KERNEL.launch(problem, x, out)


@op(check=_check_transpose, oracle=oracles.transpose, cost=_cost, cases=TRANSPOSE)
def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix: `out[j, i] = x[i, j]`, bit for bit.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[rows, cols]` | any of 1, 2, 4 or 8 bytes | `stride(1) == 1`, rows may be strided |
    | returns | `[cols, rows]` | as `x` | contiguous, on `x.device` |

    Any sizes, zero included. Fastest (16-byte accesses) when rows start on 16-byte boundaries and
    `rows` fills a multiple of 16 bytes.

    Raises `TypeError` on an element width other than 1, 2, 4 or 8 bytes, `ValueError` on a rank
    other than 2 or an inner stride other than 1.

    >>> transpose(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist()
    [[1, 4], [2, 5], [3, 6]]
    """
    rows, cols = x.shape
    out = x.new_empty((cols, rows))
    _launch(x, out)
    return out


@op(
    check=_check_batched_transpose,
    oracle=oracles.batched_transpose,
    cost=_cost,
    cases=BATCHED_TRANSPOSE,
)
def batched_transpose(x: Tensor) -> Tensor:
    """Transpose each matrix of a batch: `out[b, j, i] = x[b, i, j]`, bit for bit.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[batch, rows, cols]` | any of 1, 2, 4 or 8 bytes | `stride(2) == 1`, else any |
    | returns | `[batch, cols, rows]` | as `x` | contiguous, on `x.device` |

    Any sizes, zero included; fastest as for `transpose`. Raises as `transpose` does, for rank 3.

    >>> batched_transpose(torch.arange(4).view(1, 2, 2)).tolist()
    [[[0, 2], [1, 3]]]
    """
    batch, rows, cols = x.shape
    out = x.new_empty((batch, cols, rows))
    _launch(x, out, batch, x.stride(0))
    return out


# A gradient may come expanded, as that of a sum does.
gradient(transpose, lambda _, grad: transpose(grad.contiguous()))
gradient(batched_transpose, lambda _, grad: batched_transpose(grad.contiguous()))
