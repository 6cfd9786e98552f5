"""`mhc_pre_apply_mix` and its gradients: a sublayer reads the weighted sum of the streams."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.apply import reference
from tile_kernels.mhc.gradients import check_like, differentiated_by
from tile_kernels.mhc.tiling import plan_gradient, plan_mix
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_APPLY = Kernel("tile_kernels.mhc.apply.kernel", "apply_mix", plan_mix)
_BACKWARD = Kernel("tile_kernels.mhc.apply.kernel", "apply_mix_backward", plan_gradient)


class Arguments(NamedTuple):
    x: Tensor
    mix: Tensor

    def outputs(self) -> Out:
        *leading, _, h = self.x.shape
        return Out("out", (*leading, h), torch.bfloat16)

    def launches(self, out: Spec) -> Launch | None:
        if out.numel() == 0:
            return None
        m, h = self.x.shape[-2:]
        x, mix, out = shapes.rows(self.x, m, h), shapes.rows(self.mix, m, 1), shapes.rows(out, h)
        num_tokens = Size(lambda a: math.prod(a.x.shape[:-2]))
        return Launch(_APPLY, (m, h, num_tokens, alignment(x, out), alignment(mix)), (x, mix, out))


def check(a: Any) -> None:
    tokens, m, _ = shapes.streams("x", a.x)
    shapes.tensor("mix", a.mix, ("mhc_mult", "1"), torch.float32, like=tokens, sizes=(m, 1))


def cost(x: Tensor, mix: Tensor) -> Cost:
    return Cost(
        bytes=2 * x.numel() + 4 * mix.numel() + 2 * x.numel() // x.shape[-2], flops=2 * x.numel()
    )


def _gradients(grads: Any, given: Any, _: Any) -> tuple[Tensor, Tensor]:
    return mhc_pre_apply_mix_bwd(*grads, *given)


MHC_PRE_APPLY_MIX = Operator(
    "mhc.mhc_pre_apply_mix",
    Arguments,
    check=check,
    reference=reference.mhc_pre_apply_mix,
    cost=cost,
    dynamic={"x": 2, "mix": 2},
    out=("out",),
    **differentiated_by(_gradients),
)


@MHC_PRE_APPLY_MIX.public()
def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums the streams of each token, weighted by its mixes: the input of a sublayer.

    `sum_i mix[i] * x[i]` is computed in float32: from 0, streams in order, one fused multiply-add
    each; the sum is rounded to bfloat16. Differentiable in both, by `mhc_pre_apply_mix_bwd`.
    Fastest (16-byte accesses) where `h` is a multiple of 8.

    Args:
        x: `[..., m, h]`, bfloat16, contiguous, 1 to 8 streams.
        mix: `[..., m, 1]`, float32, contiguous.
        out: Buffer for the result, contiguous. It is filled and returned.

    Returns:
        `[..., h]`, bfloat16, contiguous.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
        >>> mhc_pre_apply_mix(x.bfloat16(), mix).tolist()
        [1.75, 2.5]
    """
    return MHC_PRE_APPLY_MIX(x, mix, out=out)


# ---- the gradients ------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    """With `grad_x` the gradient of the streams is added to it and is no result."""

    grad_out: Tensor
    x: Tensor
    mix: Tensor
    grad_x: Tensor | None

    def check(self) -> None:
        check(self)
        shapes.tensor(
            "grad_out", self.grad_out, ("hidden",), torch.bfloat16,
            like=("x", self.x.shape[:-2]), sizes=(self.x.shape[-1],), contiguous=False,
        )  # fmt: skip
        if self.grad_x is not None:
            check_like("grad_x", self.grad_x, ("x", self.x), contiguous=True)

    def outputs(self) -> tuple[Out, Out]:
        return Out("grad_x", self.x.shape, torch.bfloat16), outputs_in_place(self)

    def launches(self, *results: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        m, h = self.x.shape[-2:]
        added, written = self.grad_x is not None, (self.grad_x, *results)[-2]
        grad_out, x = shapes.rows(self.grad_out, h), shapes.rows(self.x, m, h)
        grad_x, grad_mix = shapes.rows(written, m, h), shapes.rows(results[-1], m, 1)
        mix = shapes.rows(self.mix, m, 1)
        problem = (m, h, added, alignment(grad_out, x, grad_x), alignment(mix))
        return Launch(_BACKWARD, problem, (grad_out, x, mix, grad_x, grad_mix))


def outputs_in_place(a: BackwardArguments) -> Out:
    return Out("grad_mix", a.mix.shape, torch.float32)


def cost_backward(grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor | None = None) -> Cost:
    streams = 2 if grad_x is None else 3
    return Cost(bytes=2 * grad_out.numel() + 2 * streams * x.numel() + 8 * mix.numel())


def _reference_in_place(*arguments: Any) -> Tensor:
    return reference.mhc_pre_apply_mix_bwd(*arguments)[1]


MHC_PRE_APPLY_MIX_BWD = Operator(
    "mhc.mhc_pre_apply_mix_bwd",
    BackwardArguments,
    reference=reference.mhc_pre_apply_mix_bwd,
    cost=cost_backward,
    dynamic={"grad_out": 1, "x": 2, "mix": 2},
)

_IN_PLACE = Operator(
    "mhc._mhc_pre_apply_mix_bwd_in_place",
    BackwardArguments,
    outputs=outputs_in_place,
    reference=_reference_in_place,
    dynamic={"grad_out": 1, "x": 2, "mix": 2, "grad_x": 2},
    mutates=("grad_x",),
    serves="mhc_pre_apply_mix_bwd",
)


@MHC_PRE_APPLY_MIX_BWD.public(reference=reference.mhc_pre_apply_mix_bwd, mutates=("grad_x",))
def mhc_pre_apply_mix_bwd(
    grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `mhc_pre_apply_mix`; that of the streams may be added to another.

    `grad_x[i] = mix[i] * grad_out`, plus what a given `grad_x` holds, in float32 with one rounding
    of product and sum, then rounded to bfloat16. `grad_mix[i]` is the sum of `grad_out * x[i]` over
    the columns in float32, in a fixed order.

    Args:
        grad_out: `[..., h]`, bfloat16, any strides.
        x: `[..., m, h]`, bfloat16, contiguous, 1 to 8 streams.
        mix: `[..., m, 1]`, float32, contiguous.
        grad_x: `[..., m, h]`, bfloat16, contiguous, to be added to in place; or None. It must not
            share memory with another argument.

    Returns:
        `(grad_x, grad_mix)`: `[..., m, h]`, bfloat16, new or the one given, and `[..., m, 1]`,
        float32; both contiguous.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()
        >>> mix, total = torch.tensor([[0.25], [0.5]]), torch.ones(2, 2).bfloat16()
        >>> grad_x, grad_mix = mhc_pre_apply_mix_bwd(torch.ones(2).bfloat16(), x, mix, total)
        >>> total.tolist(), grad_mix.tolist()
        ([[1.25, 1.25], [1.5, 1.5]], [[3.0], [7.0]])
    """
    if grad_x is None:
        return MHC_PRE_APPLY_MIX_BWD(grad_out, x, mix, None)
    return grad_x, _IN_PLACE(grad_out, x, mix, grad_x)
