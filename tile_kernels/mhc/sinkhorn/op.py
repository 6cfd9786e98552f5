"""`sinkhorn_normalize` and its gradient: logits to nearly doubly stochastic matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.gradients import bytes_per_element, check_like, differentiated_by
from tile_kernels.mhc.sinkhorn import reference
from tile_kernels.mhc.sinkhorn.plan import MAX_REPEAT, is_near, plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_NORMALIZE = Kernel("tile_kernels.mhc.sinkhorn.kernel", "sinkhorn_normalize", plan)
_BACKWARD = Kernel("tile_kernels.mhc.sinkhorn.kernel", "sinkhorn_backward", plan)


class Arguments(NamedTuple):
    x: Tensor
    repeat: int
    eps: float

    def outputs(self) -> Out:
        return Out("out", self.x.shape, torch.float32)

    def launches(self, out: Spec) -> Launch | None:
        return _launch(_NORMALIZE, self, (self.x, out))


def _launch(kernel: Kernel, a: Any, tensors: Sequence[Any]) -> Launch | None:
    """`tensors` are all that is read or written, in the kernel's order."""
    if a.x.numel() == 0:
        return None
    size = a.x.shape[-1]
    matrices = [shapes.rows(each, size, size) for each in tensors]
    problem = (size, alignment(*matrices), is_near(a.eps))
    return Launch(kernel, problem, (*matrices, a.repeat, float(a.eps)))


def check_steps(
    repeat: int, eps: float, repeat_name: str = "repeat", eps_name: str = "eps"
) -> None:
    """Checks that `repeat` is at least 1 and `eps` not negative."""
    checks.integer(repeat_name, repeat, 1, MAX_REPEAT)
    checks.epsilon(eps_name, eps)


def check(a: Any) -> None:
    shapes.tensor("x", a.x, ("M", "M"), torch.float32, contiguous=False)
    size = a.x.shape[-1]
    if a.x.shape[-2] != size or not 1 <= size <= shapes.MAX_STREAMS:
        raise ValueError(
            f"x must hold square matrices of 1..{shapes.MAX_STREAMS} rows, got shape "
            f"{tuple(a.x.shape)}"
        )
    check_steps(a.repeat, a.eps)


def _gradient(grads: Any, given: Any, steps: Any) -> Tensor:
    return sinkhorn_normalize_bwd(*grads, *given, *steps)


SINKHORN_NORMALIZE = Operator(
    "mhc.sinkhorn_normalize",
    Arguments,
    check=check,
    reference=reference.sinkhorn_normalize,
    cost=bytes_per_element("x", 8),
    dynamic={"x": 2},
    out=("out",),
    **differentiated_by(_gradient),
)


@SINKHORN_NORMALIZE.public()
def sinkhorn_normalize(
    x: Tensor, repeat: int = 10, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    """Normalizes rows and columns of positive matrices in turn, until both nearly sum to 1.

    `y = softmax(x) + eps` along rows, then columns are divided by `sum + eps`, then `repeat - 1`
    times rows and columns are divided by `sum + eps`. Columns come last and sum to 1 up to `eps`;
    the sums of rows come closer to 1 with a larger `repeat`. Sums add neighbours first; quotients
    are correctly rounded. A matrix with NaN, +inf or a row of -inf becomes NaN. Differentiable, by
    `sinkhorn_normalize_bwd`.

    Args:
        x: `[..., M, M]`, float32: logits, `M` from 1 to 8, any strides.
        repeat: The number of normalizations of the columns, at least 1.
        eps: Added to the softmax and to every sum, at least 0.
        out: Buffer for the result, contiguous. It is filled and returned; not with gradients.

    Returns:
        `[..., M, M]`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If the matrices are not square, `M` is not in 1 to 8, or a number is out of
            range.

    Example:
        >>> sinkhorn_normalize(torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), 2)
        tensor([[0.3636, 0.6316],
                [0.6364, 0.3684]])
    """
    return SINKHORN_NORMALIZE(x, repeat, eps, out=out)


# ---- the gradient -------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    grad_out: Tensor
    x: Tensor
    repeat: int
    eps: float

    def check(self) -> None:
        check(self)
        check_like("grad_out", self.grad_out, ("x", self.x), dims=("M", "M"))

    def outputs(self) -> Out:
        return Out("out", self.x.shape, torch.float32)

    def launches(self, grad_x: Spec) -> Launch | None:
        return _launch(_BACKWARD, self, (self.grad_out, self.x, grad_x))


SINKHORN_NORMALIZE_BWD = Operator(
    "mhc.sinkhorn_normalize_bwd",
    BackwardArguments,
    reference=reference.sinkhorn_normalize_bwd,
    cost=bytes_per_element("x", 12),
    dynamic={"grad_out": 2, "x": 2},
    out=("out",),
)


@SINKHORN_NORMALIZE_BWD.public()
def sinkhorn_normalize_bwd(
    grad_out: Tensor,
    x: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the gradient of `sinkhorn_normalize`; its steps are computed again.

    A step `y' = y / d` with `d = sum(y) + eps` has the gradient `(g - sum(g * y')) / d`, the
    softmax `p` has `(g - sum(g * p)) * p`. Only the time grows with `repeat`, not the memory.

    Args:
        grad_out: `[..., M, M]`, float32, any strides: the gradient of the result.
        x: `[..., M, M]`, float32, `M` from 1 to 8, any strides: the logits.
        repeat: As for `sinkhorn_normalize`, at least 1.
        eps: As for `sinkhorn_normalize`, at least 0.
        out: Buffer for the result, contiguous. It is filled and returned.

    Returns:
        The gradient of `x`: `[..., M, M]`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape differs, `M` is not in 1 to 8, or a number is out of range.

    Example:
        >>> x = torch.tensor([[0.0, 1.0986123], [0.0, 0.0]])
        >>> sinkhorn_normalize_bwd(torch.tensor([[1.0, 0.0], [0, 0]]), x, 2)
        tensor([[ 0.1240, -0.1240],
                [-0.1198,  0.1198]])
    """
    return SINKHORN_NORMALIZE_BWD(grad_out, x, repeat, eps, out=out)
