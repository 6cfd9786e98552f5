"""Entering the streams: a hidden state becomes the residual of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.expand import EXPAND_TO_MHC, EXPAND_TO_MHC_BWD
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import mhc as oracles

_EXPAND = Kernel("tile_kernels.mhc.kernels.expand", "expand")
_BACKWARD = Kernel("tile_kernels.mhc.kernels.expand", "expand_backward")


def _check_backward(grad_out: Tensor) -> None:
    shapes.streams("grad_out", grad_out, contiguous=False)


@op(
    check=_check_backward,
    oracle=oracles.expand_to_mhc_bwd,
    cost=lambda grad_out: Cost(
        bytes=2 * (grad_out.numel() + grad_out.numel() // grad_out.shape[-2])
    ),
    cases=EXPAND_TO_MHC_BWD,
)
def expand_to_mhc_bwd(grad_out: Tensor) -> Tensor:
    """The gradient of `expand_to_mhc`: the sum of the streams.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `grad_out` | `[..., m, h]`, 1 to 8 streams | bfloat16 | any |
    | returns | `[..., h]` | bfloat16 | contiguous |

    Added in float32, in the order of the streams, and rounded once.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> expand_to_mhc_bwd(torch.tensor([[1.0, 2, 3], [4, 5, 6]]).bfloat16()).tolist()
    [5.0, 7.0, 9.0]
    """
    *leading, m, h = grad_out.shape
    out = grad_out.new_empty((*leading, h))
    if nonempty(out):
        grad, to = shapes.rows(grad_out, m, h), shapes.rows(out, 1, h)
        problem = (m, h, grad.shape[0], shapes.common_alignment(grad, to))
        _BACKWARD.launch(problem, grad, to)
    return out


def _check(hidden: Tensor, mhc_mult: int) -> None:
    shapes.tensor("hidden", hidden, ("hidden",), torch.bfloat16)
    if hidden.shape[-1] < 1:
        raise ValueError("hidden must have at least one column, got 0")
    checks.integer("mhc_mult", mhc_mult, 1, shapes.MOST_STREAMS)


@op(
    check=_check,
    oracle=oracles.expand_to_mhc,
    cost=lambda hidden, mhc_mult: Cost(bytes=2 * hidden.numel() * (1 + mhc_mult)),
    cases=EXPAND_TO_MHC,
    outputs=("out",),
)
def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Every stream a copy of the hidden state.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `hidden` | `[..., h]` | bfloat16 | contiguous |
    | `mhc_mult` | | int in `1..8`: the streams `m` | |
    | `out` | as returned; filled and returned | | |
    | returns | `[..., m, h]` | bfloat16 | contiguous |

    Differentiable: the gradient is the sum over the streams, `expand_to_mhc_bwd`.

    Fastest (16-byte accesses) where `h` is a multiple of 8. Raises `TypeError` or `ValueError` with
    the argument's name.

    >>> expand_to_mhc(torch.tensor([0.0, 1.0, 2.0]).bfloat16(), 2).tolist()
    [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """
    *leading, h = hidden.shape
    out = output("out", out, hidden, (*leading, mhc_mult, h))
    if nonempty(out):
        x, to = shapes.rows(hidden, 1, h), shapes.rows(out, mhc_mult, h)
        problem = (mhc_mult, h, x.shape[0], shapes.common_alignment(x, to))
        _EXPAND.launch(problem, x, to)
    return out


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG001
    return expand_to_mhc_bwd(grad), None


gradient(expand_to_mhc, _backward)
