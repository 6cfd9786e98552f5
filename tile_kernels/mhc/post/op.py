"""`mhc_post`, `mhc_post_fwd` and their gradients: a sublayer writes the next residual."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.gradients import check_like, differentiated_by
from tile_kernels.mhc.post import reference
from tile_kernels.mhc.tiling import plan_gradient, plan_mix
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_POST = Kernel("tile_kernels.mhc.post.kernel", "post", plan_mix)
_BACKWARD = Kernel("tile_kernels.mhc.post.kernel", "post_backward", plan_gradient)

_DYNAMIC = {"x": 1, "residual": 2, "post_layer_mix": 2, "comb_res_mix": 2}


class Arguments(NamedTuple):
    x: Tensor
    residual: Tensor
    post_layer_mix: Tensor
    comb_res_mix: Tensor


def check(a: Any) -> None:
    tokens, m, h = shapes.streams("residual", a.residual, contiguous=False)
    shapes.tensor("x", a.x, ("hidden",), torch.bfloat16, like=tokens, sizes=(h,))
    dims = ("mhc_mult", "mhc_mult")
    for name, value, last in (
        ("post_layer_mix", a.post_layer_mix, (m, 1)),
        ("comb_res_mix", a.comb_res_mix, (m, m)),
    ):
        shapes.tensor(name, value, dims, torch.float32, like=tokens, sizes=last)


def outputs(a: Arguments) -> Out:
    return Out("out", a.residual.shape, torch.bfloat16)


def launches(a: Arguments, out: Spec) -> Launch | None:
    if out.numel() == 0:
        return None
    m, h = out.shape[-2:]
    x, residual, out = shapes.rows(a.x, h), shapes.rows(a.residual, m, h), shapes.rows(out, m, h)
    post, comb = shapes.rows(a.post_layer_mix, m, 1), shapes.rows(a.comb_res_mix, m, m)
    num_tokens = Size(lambda a: math.prod(a.residual.shape[:-2]))
    problem = (m, h, num_tokens, alignment(x, residual, out), alignment(post, comb))
    return Launch(_POST, problem, (x, residual, post, comb, out))


def cost(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Cost:
    mixes = post_layer_mix.numel() + comb_res_mix.numel()
    return Cost(
        bytes=2 * x.numel() + 4 * residual.numel() + 4 * mixes,
        flops=2 * residual.numel() * (1 + residual.shape[-2]),
    )


def _gradients(grads: Any, given: Any, _: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return mhc_post_bwd(*given, *grads)


_declare = functools.partial(
    Operator,
    arguments=Arguments,
    check=check,
    outputs=outputs,
    launches=launches,
    reference=reference.mhc_post,
    cost=cost,
    dynamic=_DYNAMIC,
    out=("out",),
    in_place=("residual",),
)
MHC_POST = _declare("mhc.mhc_post", **differentiated_by(_gradients))
MHC_POST_FWD = _declare("mhc.mhc_post_fwd", instead="tile_kernels.mhc.mhc_post")


@MHC_POST.public()
def mhc_post(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the next residual: mixes the streams and adds the output of a sublayer to each.

    `out[j] = post[j] * x + sum_i comb[i, j] * residual[i]` in float32: the product first, then the
    streams in order, one fused multiply-add each; the sum is rounded to bfloat16. Differentiable in
    all four tensors, by `mhc_post_bwd`. Fastest (16-byte accesses) where `h` is a multiple of 8.

    Args:
        x: `[..., h]`, bfloat16, contiguous: the sublayer's output.
        residual: `[..., m, h]`, bfloat16, 1 to 8 streams, any strides.
        post_layer_mix: `[..., m, 1]`, float32, contiguous: how much of `x` each stream gets.
        comb_res_mix: `[..., m, m]`, float32, contiguous: from stream, to stream.
        out: Buffer for the result, contiguous; it may be `residual` itself. It is filled and
            returned.

    Returns:
        `[..., m, h]`, bfloat16, contiguous.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> mhc_post(x.bfloat16(), residual.bfloat16(), post, comb).tolist()
        [[12.25, 23.5], [6.75, 12.5]]
    """
    return MHC_POST(x, residual, post_layer_mix, comb_res_mix, out=out)


@MHC_POST_FWD.public()
def mhc_post_fwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Computes `mhc_post` without a gradient, for callers that write the backward pass themselves.

    The gradients are those of `mhc_post_bwd`.

    Args:
        x: As for `mhc_post`.
        residual: As for `mhc_post`.
        post_layer_mix: As for `mhc_post`.
        comb_res_mix: As for `mhc_post`.
        out: As for `mhc_post`.

    Returns:
        As `mhc_post`.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> x, one = torch.tensor([10.0, 20.0]).bfloat16(), torch.ones(1, 1)
        >>> mhc_post_fwd(x, x[None], one, one / 2).tolist()
        [[15.0, 30.0]]
    """
    return MHC_POST_FWD(x, residual, post_layer_mix, comb_res_mix, out=out)


# ---- the gradients ------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    x: Tensor
    residual: Tensor
    post_layer_mix: Tensor
    comb_res_mix: Tensor
    d_o: Tensor

    def check(self) -> None:
        check(self)
        check_like("d_o", self.d_o, ("residual", self.residual))

    def outputs(self) -> tuple[Out, Out, Out, Out]:
        return (
            Out("d_x", self.x.shape, torch.bfloat16),
            Out("d_residual", self.residual.shape, torch.bfloat16),
            Out("d_post", self.post_layer_mix.shape, torch.float32),
            Out("d_comb", self.comb_res_mix.shape, torch.float32),
        )

    def launches(self, d_x: Spec, d_residual: Spec, d_post: Spec, d_comb: Spec) -> Launch | None:
        if d_residual.numel() == 0:
            return None
        m, h = d_residual.shape[-2:]
        x, d_x = shapes.rows(self.x, h), shapes.rows(d_x, h)
        residual, d_o, d_residual = (
            shapes.rows(t, m, h) for t in (self.residual, self.d_o, d_residual)
        )
        post, d_post = shapes.rows(self.post_layer_mix, m, 1), shapes.rows(d_post, m, 1)
        comb, d_comb = shapes.rows(self.comb_res_mix, m, m), shapes.rows(d_comb, m, m)
        aligned = alignment(x, residual, d_o, d_x, d_residual)
        return Launch(
            _BACKWARD, (m, h, False, aligned, alignment(post, comb)),
            (x, residual, post, comb, d_o, d_x, d_residual, d_post, d_comb),
        )  # fmt: skip


def cost_backward(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor
) -> Cost:
    mixes = post_layer_mix.numel() + comb_res_mix.numel()
    return Cost(
        bytes=4 * x.numel() + 4 * residual.numel() + 2 * d_o.numel() + 8 * mixes,
        flops=4 * residual.numel() * (1 + residual.shape[-2]),
    )


MHC_POST_BWD = Operator(
    "mhc.mhc_post_bwd",
    BackwardArguments,
    reference=reference.mhc_post_bwd,
    cost=cost_backward,
    dynamic={**_DYNAMIC, "d_o": 2},
)


@MHC_POST_BWD.public()
def mhc_post_bwd(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of `mhc_post` from its arguments and the gradient of its result.

    `d_x = sum_j post[j] * d_o[j]` and `d_residual[i] = sum_j comb[i, j] * d_o[j]` in float32: from
    0, streams in order, one fused multiply-add each; then rounded to bfloat16. `d_post[j]`, the sum
    of `x * d_o[j]` over the columns, and `d_comb[i, j]`, that of `residual[i] * d_o[j]`, are
    float32 sums in a fixed order.

    Args:
        x: `[..., h]`, bfloat16, contiguous.
        residual: `[..., m, h]`, bfloat16, 1 to 8 streams, any strides.
        post_layer_mix: `[..., m, 1]`, float32, contiguous.
        comb_res_mix: `[..., m, m]`, float32, contiguous.
        d_o: `[..., m, h]`, bfloat16, any strides: the gradient of the result.

    Returns:
        The gradients of `x`, `residual`, `post_layer_mix` and `comb_res_mix`, in their shapes and
        dtypes, contiguous.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> x, one = torch.tensor([10.0, 20.0]).bfloat16(), torch.ones(1, 1)
        >>> d_x, d_residual, d_post, d_comb = mhc_post_bwd(x, x[None], one, one / 2, x[None])
        >>> d_x.tolist(), d_residual.tolist(), d_post.item(), d_comb.item()
        ([10.0, 20.0], [[5.0, 10.0]], 500.0, 500.0)
    """
    return MHC_POST_BWD(x, residual, post_layer_mix, comb_res_mix, d_o)
