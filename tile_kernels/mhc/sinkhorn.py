"""Logits to nearly doubly stochastic matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.sinkhorn import SINKHORN_NORMALIZE, SINKHORN_NORMALIZE_BWD
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.torch import mhc as oracles

MOST_REPEAT = 2**20

_NORMALIZE = Kernel("tile_kernels.mhc.kernels.sinkhorn", "sinkhorn_normalize")
_BACKWARD = Kernel("tile_kernels.mhc.kernels.sinkhorn", "sinkhorn_backward")


def is_near(eps: float) -> bool:
    """Whether no divisor and no quotient can overflow, underflow or come near."""
    return 1e-20 <= eps <= 1.0


def check_steps(
    repeat: int, eps: float, repeat_name: str = "repeat", eps_name: str = "eps"
) -> None:
    """`repeat` is at least 1, `eps` not negative."""
    checks.integer(repeat_name, repeat, 1, MOST_REPEAT)
    checks.epsilon(eps_name, eps)


def _check(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> None:
    shapes.tensor("x", x, ("M", "M"), torch.float32, contiguous=False)
    size = x.shape[-1]
    if x.shape[-2] != size or not 1 <= size <= shapes.MOST_STREAMS:
        raise ValueError(
            f"x must hold square matrices of 1..{shapes.MOST_STREAMS} rows, got shape "
            f"{tuple(x.shape)}"
        )
    check_steps(repeat, eps)


def _check_backward(grad_out: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6) -> None:
    _check(x, repeat, eps)
    shapes.tensor(
        "grad_out", grad_out, ("M", "M"), torch.float32, like=("x", x.shape[:-2]),
        sizes=tuple(x.shape[-2:]), contiguous=False,
    )  # fmt: skip


@op(
    check=_check_backward,
    oracle=oracles.sinkhorn_normalize_bwd,
    cost=lambda grad_out, x, **_: Cost(bytes=12 * x.numel()),  # noqa: ARG005
    cases=SINKHORN_NORMALIZE_BWD,
)
def sinkhorn_normalize_bwd(
    grad_out: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6
) -> Tensor:
    """The gradient of `sinkhorn_normalize`, whose steps are computed again.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `grad_out` | `[..., M, M]` | float32 | any |
    | `x` | `[..., M, M]`, `M` from 1 to 8 | float32 | any |
    | `repeat` | | int, at least 1 | |
    | `eps` | | float, at least 0 | |
    | returns | `[..., M, M]` | float32 | contiguous |

    A step `y' = y / d` with `d = sum(y) + eps` has the gradient `(g - sum(g * y')) / d`, the
    softmax `p` has `(g - sum(g * p)) * p`. Nothing grows with `repeat` but the time.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> x, grad = torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0, 0]])
    >>> sinkhorn_normalize_bwd(grad, x, 2)
    tensor([[ 0.1240, -0.1240],
            [-0.1198,  0.1198]])
    """
    grad_x = x.new_empty(x.shape)
    if nonempty(x):
        size = x.shape[-1]
        given, grad, to = (shapes.rows(t, size, size) for t in (x, grad_out, grad_x))
        problem = (size, shapes.common_alignment(given, grad, to), is_near(eps))
        _BACKWARD.launch(problem, grad, given, to, repeat, float(eps))
    return grad_x


@op(
    check=_check,
    oracle=oracles.sinkhorn_normalize,
    cost=lambda x, **_: Cost(bytes=8 * x.numel()),
    cases=SINKHORN_NORMALIZE,
)
def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Rows and columns of positive matrices normalised in turn, until both nearly sum to 1.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[..., M, M]`: logits, `M` from 1 to 8 | float32 | any |
    | `repeat` | | int, at least 1 | |
    | `eps` | | float, at least 0 | |
    | returns | `[..., M, M]` | float32 | contiguous |

    `y = softmax(x) + eps` along rows, then columns over `sum + eps`, then `repeat - 1` times rows
    and columns over `sum + eps`. Columns come last and sum to 1 up to `eps`; rows do the closer,
    the larger `repeat`. Sums add neighbours first; quotients are correctly rounded. Differentiable,
    by `sinkhorn_normalize_bwd`. NaN, +inf or a row of -inf makes NaN of a matrix.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> sinkhorn_normalize(torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), 2)
    tensor([[0.3636, 0.6316],
            [0.6364, 0.3684]])
    """
    out = x.new_empty(x.shape)
    if nonempty(x):
        size = x.shape[-1]
        given, to = shapes.rows(x, size, size), shapes.rows(out, size, size)
        problem = (size, shapes.common_alignment(given, to), is_near(eps))
        _NORMALIZE.launch(problem, given, to, repeat, float(eps))
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0])
    ctx.steps = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    return sinkhorn_normalize_bwd(grad, x, *ctx.steps), None, None


gradient(sinkhorn_normalize, _backward, setup_context=_save)
