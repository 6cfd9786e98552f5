"""What a sublayer writes to the streams: the next residual."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.write import MHC_POST, MHC_POST_BWD
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import mhc as oracles

_POST = Kernel("tile_kernels.mhc.kernels.write", "post")
_BACKWARD = Kernel("tile_kernels.mhc.kernels.write", "post_backward")

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def _check(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> None:
    tokens, m, h = shapes.streams("residual", residual, contiguous=False)
    shapes.tensor("x", x, ("hidden",), torch.bfloat16, like=tokens, sizes=(h,))
    dims = ("mhc_mult", "mhc_mult")
    for name, value, last in (
        ("post_layer_mix", post_layer_mix, (m, 1)),
        ("comb_res_mix", comb_res_mix, (m, m)),
    ):
        shapes.tensor(name, value, dims, torch.float32, like=tokens, sizes=last)


def _check_backward(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor
) -> None:
    _check(x, residual, post_layer_mix, comb_res_mix)
    shapes.tensor(
        "d_o", d_o, shapes.STREAMS, torch.bfloat16, like=("residual", residual.shape[:-2]),
        sizes=tuple(residual.shape[-2:]), contiguous=False,
    )  # fmt: skip


def _cost(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Cost:
    mixes = post_layer_mix.numel() + comb_res_mix.numel()
    return Cost(
        bytes=2 * x.numel() + 4 * residual.numel() + 4 * mixes,
        flops=2 * residual.numel() * (1 + residual.shape[-2]),
    )


def _cost_backward(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor
) -> Cost:
    mixes = post_layer_mix.numel() + comb_res_mix.numel()
    return Cost(
        bytes=4 * x.numel() + 4 * residual.numel() + 2 * d_o.numel() + 8 * mixes,
        flops=4 * residual.numel() * (1 + residual.shape[-2]),
    )


# ---- backward -----------------------------------------------------------------------------------


@op(
    check=_check_backward,
    oracle=oracles.mhc_post_bwd,
    cost=_cost_backward,
    cases=MHC_POST_BWD,
)
def mhc_post_bwd(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mhc_post` from its arguments and the gradient of its result.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[..., h]` | bfloat16 | contiguous |
    | `residual` | `[..., m, h]`, 1 to 8 streams | bfloat16 | any |
    | `post_layer_mix` | `[..., m, 1]` | float32 | contiguous |
    | `comb_res_mix` | `[..., m, m]` | float32 | contiguous |
    | `d_o` | `[..., m, h]` | bfloat16 | any |
    | returns | four gradients, as `x`, `residual` and the two mixes | | contiguous |

    `d_x = sum_j post[j] * d_o[j]` and `d_residual[i] = sum_j comb[i, j] * d_o[j]` in float32: from
    0, streams in order, one fused multiply-add each; then rounded to bfloat16. `d_post[j]`, the sum
    of `x * d_o[j]` over the columns, and `d_comb[i, j]`, that of `residual[i] * d_o[j]`, are
    float32 sums in a fixed order.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> d_x, d_residual, d_post, d_comb = mhc_post_bwd(
    ...     x.bfloat16(), residual.bfloat16(), post, comb, torch.eye(2).bfloat16()
    ... )
    >>> d_x.tolist(), d_post.tolist(), d_comb.tolist()
    ([1.0, 0.5], [[10.0], [20.0]], [[1.0, 2.0], [3.0, 4.0]])
    """
    m, h = residual.shape[-2:]
    d_x, d_residual, d_post, d_comb = (
        t.new_empty(t.shape) for t in (x, residual, post_layer_mix, comb_res_mix)
    )
    if nonempty(residual):
        output, streams, grad = (
            shapes.rows(x, 1, h), shapes.rows(residual, m, h), shapes.rows(d_o, m, h),
        )  # fmt: skip
        post, comb = shapes.rows(post_layer_mix, m), shapes.rows(comb_res_mix, m * m)
        to_x, to_residual = shapes.rows(d_x, 1, h), shapes.rows(d_residual, m, h)
        problem = (
            m, h, False, shapes.common_alignment(output, streams, grad, to_x, to_residual),
            shapes.common_alignment(post, comb),
        )  # fmt: skip
        _BACKWARD.launch(
            problem, output, streams, post, comb, grad, to_x, to_residual, shapes.rows(d_post, m),
            shapes.rows(d_comb, m * m),
        )  # fmt: skip
    return d_x, d_residual, d_post, d_comb


# ---- forward ------------------------------------------------------------------------------------


def _launch(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None,
) -> Tensor:
    m, h = residual.shape[-2:]
    out = output("out", out, residual, residual.shape)
    if nonempty(residual):
        given, streams, to = (
            shapes.rows(x, 1, h), shapes.rows(residual, m, h), shapes.rows(out, m, h),
        )  # fmt: skip
        post, comb = shapes.rows(post_layer_mix, m), shapes.rows(comb_res_mix, m * m)
        problem = (
            m, h, streams.shape[0], shapes.common_alignment(given, streams, to),
            shapes.common_alignment(post, comb),
        )  # fmt: skip
        _POST.launch(problem, given, streams, post, comb, to)
    return out


_declared = functools.partial(
    op, check=_check, oracle=oracles.mhc_post, cost=_cost, cases=MHC_POST, outputs=("out",),
    in_place=("residual",),
)  # fmt: skip


@_declared()
def mhc_post(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The next residual: the streams mixed, and the output of a sublayer added to each.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[..., h]`: the sublayer's output | bfloat16 | contiguous |
    | `residual` | `[..., m, h]`, 1 to 8 streams | bfloat16 | any |
    | `post_layer_mix` | `[..., m, 1]`: how much of `x` a stream gets | float32 | contiguous |
    | `comb_res_mix` | `[..., m, m]`: from stream, to stream | float32 | contiguous |
    | `out` | as returned; filled and returned | | |
    | returns | `[..., m, h]` | bfloat16 | contiguous |

    `out[j] = post[j] * x + sum_i comb[i, j] * residual[i]` in float32: the product first, then the
    streams in order, one fused multiply-add each; then rounded to bfloat16. Differentiable in all
    four, by `mhc_post_bwd`.

    Fastest (16-byte accesses) where `h` is a multiple of 8. Raises `TypeError` or `ValueError` with
    the argument's name.

    >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> mhc_post(x.bfloat16(), residual.bfloat16(), post, comb).tolist()
    [[12.25, 23.5], [6.75, 12.5]]
    """
    return _launch(x, residual, post_layer_mix, comb_res_mix, out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Gradients:
    x, residual, post_layer_mix, comb_res_mix = ctx.saved_tensors
    return mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, grad)


gradient(mhc_post, _backward, setup_context=_save)


@_declared(instead="tile_kernels.mhc.mhc_post")
def mhc_post_fwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """`mhc_post` without a gradient, for those who write the backward pass themselves.

    Arguments, result and errors are those of `mhc_post`; the gradients are `mhc_post_bwd`.

    >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> mhc_post_fwd(x.bfloat16(), residual.bfloat16(), post, comb).tolist()
    [[12.25, 23.5], [6.75, 12.5]]
    """
    return _launch(x, residual, post_layer_mix, comb_res_mix, out)
