"""`expand_to_mhc` and its gradient: a hidden state becomes the residual of all streams."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.expand import reference
from tile_kernels.mhc.expand.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_EXPAND = Kernel("tile_kernels.mhc.expand.kernel", "expand", plan)
_BACKWARD = Kernel("tile_kernels.mhc.expand.kernel", "expand_backward", plan)


class Arguments(NamedTuple):
    hidden: Tensor
    mhc_mult: int

    def check(self) -> None:
        shapes.tensor("hidden", self.hidden, ("hidden",), torch.bfloat16)
        if self.hidden.shape[-1] < 1:
            raise ValueError("hidden must have at least one column, got 0")
        checks.integer("mhc_mult", self.mhc_mult, 1, shapes.MAX_STREAMS)

    def outputs(self) -> Out:
        *leading, h = self.hidden.shape
        return Out("out", (*leading, self.mhc_mult, h), torch.bfloat16)

    def launches(self, out: Spec) -> Launch | None:
        if out.numel() == 0:
            return None
        m, h = out.shape[-2:]
        hidden, out = shapes.rows(self.hidden, h), shapes.rows(out, m, h)
        num_tokens = Size(lambda a: math.prod(a.hidden.shape[:-1]))
        return Launch(_EXPAND, (m, h, num_tokens, alignment(hidden, out)), (hidden, out))


def cost(hidden: Tensor, mhc_mult: int) -> Cost:
    return Cost(bytes=2 * hidden.numel() * (1 + mhc_mult))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG001
    return expand_to_mhc_bwd(grad), None


EXPAND_TO_MHC = Operator(
    "mhc.expand_to_mhc",
    Arguments,
    reference=reference.expand_to_mhc,
    cost=cost,
    dynamic={"hidden": 1},
    out=("out",),
    backward=_backward,
)


@EXPAND_TO_MHC.public()
def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Copies the hidden state of each token to all of its streams.

    Differentiable: the gradient is the sum over the streams, `expand_to_mhc_bwd`. Fastest (16-byte
    accesses) where `h` is a multiple of 8.

    Args:
        hidden: `[..., h]`, bfloat16, contiguous.
        mhc_mult: The number of streams `m`, 1 to 8.
        out: Buffer for the result, contiguous. It is filled and returned.

    Returns:
        `[..., m, h]`, bfloat16, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or `mhc_mult` is not in 1 to 8.

    Example:
        >>> expand_to_mhc(torch.tensor([0.0, 1.0, 2.0]).bfloat16(), 2).tolist()
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """
    return EXPAND_TO_MHC(hidden, mhc_mult, out=out)


# ---- the gradient -------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    grad_out: Tensor

    def check(self) -> None:
        shapes.streams("grad_out", self.grad_out, contiguous=False)

    def outputs(self) -> Out:
        *leading, _, h = self.grad_out.shape
        return Out("out", (*leading, h), torch.bfloat16)

    def launches(self, out: Spec) -> Launch | None:
        if out.numel() == 0:
            return None
        m, h = self.grad_out.shape[-2:]
        grad, out = shapes.rows(self.grad_out, m, h), shapes.rows(out, h)
        num_tokens = Size(lambda a: math.prod(a.grad_out.shape[:-2]))
        return Launch(_BACKWARD, (m, h, num_tokens, alignment(grad, out)), (grad, out))


def cost_backward(grad_out: Tensor) -> Cost:
    return Cost(bytes=2 * (grad_out.numel() + grad_out.numel() // grad_out.shape[-2]))


EXPAND_TO_MHC_BWD = Operator(
    "mhc.expand_to_mhc_bwd",
    BackwardArguments,
    reference=reference.expand_to_mhc_bwd,
    cost=cost_backward,
    dynamic={"grad_out": 2},
    out=("out",),
)


@EXPAND_TO_MHC_BWD.public()
def expand_to_mhc_bwd(grad_out: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Computes the gradient of `expand_to_mhc`: the sum of the streams.

    The streams are added in float32, in their order, and the sum is rounded once.

    Args:
        grad_out: `[..., m, h]`, bfloat16, 1 to 8 streams, any strides.
        out: Buffer for the result, contiguous. It is filled and returned.

    Returns:
        `[..., h]`, bfloat16, contiguous.

    Raises:
        TypeError: If `grad_out` is not a bfloat16 tensor.
        ValueError: If `grad_out` has no columns, or not 1 to 8 streams.

    Example:
        >>> expand_to_mhc_bwd(torch.tensor([[1.0, 2, 3], [4, 5, 6]]).bfloat16()).tolist()
        [5.0, 7.0, 9.0]
    """
    return EXPAND_TO_MHC_BWD(grad_out, out=out)
