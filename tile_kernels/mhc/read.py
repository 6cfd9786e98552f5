"""What a sublayer reads of the streams: their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.read import MHC_PRE_APPLY_MIX, MHC_PRE_APPLY_MIX_BWD
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import face, gradient, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import mhc as oracles

_APPLY = Kernel("tile_kernels.mhc.kernels.read", "apply_mix")
_BACKWARD = Kernel("tile_kernels.mhc.kernels.read", "apply_mix_backward")


def _check(x: Tensor, mix: Tensor) -> None:
    tokens, m, _ = shapes.streams("x", x)
    shapes.tensor("mix", mix, ("mhc_mult", "1"), torch.float32, like=tokens, sizes=(m, 1))


# ---- backward -----------------------------------------------------------------------------------


def _check_backward(grad_out: Tensor, x: Tensor, mix: Tensor) -> None:
    _check(x, mix)
    shapes.tensor(
        "grad_out", grad_out, ("hidden",), torch.bfloat16, like=("x", x.shape[:-2]),
        sizes=(x.shape[-1],), contiguous=False,
    )  # fmt: skip


def _check_accumulating(grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor) -> None:
    _check_backward(grad_out, x, mix)
    shapes.tensor(
        "grad_x", grad_x, shapes.STREAMS, torch.bfloat16, like=("x", x.shape[:-2]),
        sizes=tuple(x.shape[-2:]),
    )  # fmt: skip
    checks.apart([("grad_x", grad_x)], [("grad_out", grad_out), ("x", x), ("mix", mix)])


def _launch_backward(
    grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor, added: bool
) -> Tensor:
    """Fill `grad_x`, or add to it; returns the gradient of `mix`."""
    m, h = x.shape[-2:]
    grad_mix = mix.new_empty(mix.shape)
    if nonempty(x):
        grad, streams, to = (
            shapes.rows(grad_out, 1, h), shapes.rows(x, m, h), shapes.rows(grad_x, m, h),
        )  # fmt: skip
        weights = shapes.rows(mix, m)
        problem = (
            m, h, added, shapes.common_alignment(grad, streams, to),
            shapes.common_alignment(weights),
        )  # fmt: skip
        _BACKWARD.launch(problem, grad, streams, weights, to, shapes.rows(grad_mix, m))
    return grad_mix


def _cost_backward(grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor | None = None) -> Cost:
    streams = 2 if grad_x is None else 3
    return Cost(bytes=2 * grad_out.numel() + 2 * streams * x.numel() + 8 * mix.numel())


@op(
    check=_check_backward,
    oracle=oracles.mhc_pre_apply_mix_bwd,
    cost=_cost_backward,
    cases=MHC_PRE_APPLY_MIX_BWD,
    name="mhc_pre_apply_mix_bwd",
)
def _backward_fresh(grad_out: Tensor, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape)
    return grad_x, _launch_backward(grad_out, x, mix, grad_x, False)


def _oracle_accumulating(grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor) -> Tensor:
    return oracles.mhc_pre_apply_mix_bwd(grad_out, x, mix, grad_x)[1]


@op(
    check=_check_accumulating,
    oracle=_oracle_accumulating,
    mutates=("grad_x",),
    serves="mhc_pre_apply_mix_bwd",
)
def _backward_accumulating(grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor) -> Tensor:
    return _launch_backward(grad_out, x, mix, grad_x, True)


@face(_backward_fresh, oracle=oracles.mhc_pre_apply_mix_bwd, mutates=("grad_x",))
def mhc_pre_apply_mix_bwd(
    grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of `mhc_pre_apply_mix`; that of the streams may be added to another one.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `grad_out` | `[..., h]` | bfloat16 | any |
    | `x` | `[..., m, h]`, 1 to 8 streams | bfloat16 | contiguous |
    | `mix` | `[..., m, 1]` | float32 | contiguous |
    | `grad_x` | `[..., m, h]`, added to in place; or None | bfloat16 | contiguous |
    | returns `grad_x` | `[..., m, h]`: new, or the one given | bfloat16 | contiguous |
    | returns `grad_mix` | `[..., m, 1]` | float32 | contiguous |

    `grad_x[i] = mix[i] * grad_out`, plus what was there, in float32 with one rounding of product
    and sum, then rounded to bfloat16. `grad_mix[i]` is the sum of `grad_out * x[i]` over the
    columns in float32, in a fixed order.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()
    >>> mix, there = torch.tensor([[0.25], [0.5]]), torch.ones(2, 2).bfloat16()
    >>> grad_x, grad_mix = mhc_pre_apply_mix_bwd(torch.ones(2).bfloat16(), x, mix, there)
    >>> there.tolist(), grad_mix.tolist()
    ([[1.25, 1.25], [1.5, 1.5]], [[3.0], [7.0]])
    """
    if grad_x is None:
        return _backward_fresh(grad_out, x, mix)
    return grad_x, _backward_accumulating(grad_out, x, mix, grad_x)


# ---- forward ------------------------------------------------------------------------------------


@op(
    check=_check,
    oracle=oracles.mhc_pre_apply_mix,
    cost=lambda x, mix: Cost(
        bytes=2 * x.numel() + 4 * mix.numel() + 2 * x.numel() // x.shape[-2], flops=2 * x.numel()
    ),
    cases=MHC_PRE_APPLY_MIX,
    outputs=("out",),
)
def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """The input of a sublayer: the sum of the streams, weighted by the mixes of the token.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[..., m, h]`, 1 to 8 streams | bfloat16 | contiguous |
    | `mix` | `[..., m, 1]` | float32 | contiguous |
    | `out` | as returned; filled and returned | | |
    | returns | `[..., h]` | bfloat16 | contiguous |

    `sum_i mix[i] * x[i]` in float32: from 0, streams in order, one fused multiply-add each; then
    rounded to bfloat16. Differentiable in both, by `mhc_pre_apply_mix_bwd`.

    Fastest (16-byte accesses) where `h` is a multiple of 8. Raises `TypeError` or `ValueError` with
    the argument's name.

    >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
    >>> mhc_pre_apply_mix(x.bfloat16(), mix).tolist()
    [1.75, 2.5]
    """
    *leading, m, h = x.shape
    out = output("out", out, x, (*leading, h))
    if nonempty(x):
        streams, weights, to = shapes.rows(x, m, h), shapes.rows(mix, m), shapes.rows(out, 1, h)
        problem = (
            m, h, streams.shape[0], shapes.common_alignment(streams, to),
            shapes.common_alignment(weights),
        )  # fmt: skip
        _APPLY.launch(problem, streams, weights, to)
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return mhc_pre_apply_mix_bwd(grad, *ctx.saved_tensors)


gradient(mhc_pre_apply_mix, _backward, setup_context=_save)
