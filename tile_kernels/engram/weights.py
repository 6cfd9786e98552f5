"""The weights of the gate: what two norms' weights make together, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.engram.cases.weights import FUSED_WEIGHT, GRAD_W_REDUCE
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, dtype_name, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.torch import engram as oracles

_PRODUCT = Kernel("tile_kernels.engram.kernels.weights", "product")
_REDUCE = Kernel("tile_kernels.engram.kernels.weights", "reduce_gradients")
_DTYPES = (torch.bfloat16, torch.float32)


def _check_weights(weight_hidden: Tensor, weight_embed: Tensor) -> None:
    dims = ("hc", "hidden")
    checks.tensor("weight_hidden", weight_hidden, dims, _DTYPES, contiguous=True)
    checks.tensor(
        "weight_embed", weight_embed, dims, weight_hidden.dtype, shape=tuple(weight_hidden.shape),
        contiguous=True,
    )  # fmt: skip
    checks.countable("weight_hidden", weight_hidden)


def _vector(most: int, count: int, *tensors: Tensor) -> int:
    """Elements per access: what the tensors' addresses and their number allow."""
    elements = (alignment(x) // x.element_size() for x in tensors)
    return math.gcd(most, count, *elements)


# ---- product ------------------------------------------------------------------------------------


@op(
    check=_check_weights,
    oracle=oracles.fused_weight,
    cost=lambda weight_hidden, weight_embed: Cost(  # noqa: ARG005
        weight_hidden.numel() * (2 * weight_hidden.element_size() + 4)
    ),
    cases=FUSED_WEIGHT,
)
def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The product of the weights of the two norms that the gate compares.

    | argument | shape | dtype |
    |---|---|---|
    | `weight_hidden`, `weight_embed` | `[hc, hidden]`, contiguous | bfloat16 or float32, alike |
    | returns | `[hc, hidden]`, contiguous | float32 |

    Of bfloat16 it is exact. Differentiable; `grad_w_reduce` does its rule for partial sums.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> fused_weight(torch.tensor([[1.5]]).bfloat16(), torch.tensor([[-2.25]]).bfloat16())
    tensor([[-3.3750]])
    """
    out = weight_hidden.new_empty(weight_hidden.shape, dtype=torch.float32)
    if nonempty(out):
        vector = _vector(8, out.numel(), weight_hidden, weight_embed)
        _PRODUCT.launch(
            (dtype_name(weight_hidden), vector),
            weight_hidden.view(-1), weight_embed.view(-1), out.view(-1),
        )  # fmt: skip
    return out


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _fused_weight_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    weight_hidden, weight_embed = ctx.saved_tensors
    return grad * weight_embed, grad * weight_hidden


gradient(fused_weight, _fused_weight_backward, setup_context=_save_weights)


# ---- sums of partial gradients ------------------------------------------------------------------


def _check_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    _check_weights(weight_hidden, weight_embed)
    checks.tensor(
        "grad_w_partial", grad_w_partial, ("parts", "hc", "hidden"), torch.float32,
        shape=(None, *weight_hidden.shape), contiguous=True,
    )  # fmt: skip
    for name, grad in (
        ("grad_weight_hidden", grad_weight_hidden),
        ("grad_weight_embed", grad_weight_embed),
    ):
        checks.tensor(
            name, grad, ("hc", "hidden"), torch.float32, shape=tuple(weight_hidden.shape),
            contiguous=True,
        )  # fmt: skip
    checks.apart(
        [("grad_weight_hidden", grad_weight_hidden), ("grad_weight_embed", grad_weight_embed)],
        [
            ("grad_w_partial", grad_w_partial),
            ("weight_hidden", weight_hidden),
            ("weight_embed", weight_embed),
        ],
    )


@op(
    check=_check_reduce,
    oracle=oracles.grad_w_reduce,
    cost=lambda grad_w_partial, weight_hidden, **_: Cost(
        4 * grad_w_partial.numel() + weight_hidden.numel() * (2 * weight_hidden.element_size() + 16)
    ),
    cases=GRAD_W_REDUCE,
    mutates=("grad_weight_hidden", "grad_weight_embed"),
    differentiable=False,
)
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of the two norms' weights to what their buffers hold.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_w_partial` | `[parts, hc, hidden]`, of `engram_gate_bwd` | float32 |
    | `weight_hidden`, `weight_embed` | `[hc, hidden]` | bfloat16 or float32, alike |
    | `grad_weight_hidden`, `grad_weight_embed` | `[hc, hidden]`, written | float32 |

    All are contiguous. With `S` the sum of the parts, `grad_weight_hidden += S * weight_embed` and
    `grad_weight_embed += S * weight_hidden`. Deterministic: the order of the sum is fixed.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> of_hidden, of_embed = torch.tensor([[10.0]]), torch.zeros(1, 1)
    >>> parts = torch.tensor([[[1.0]], [[3.5]]])
    >>> grad_w_reduce(parts, torch.tensor([[2.0]]), torch.tensor([[0.5]]), of_hidden, of_embed)
    >>> of_hidden.item(), of_embed.item()
    (12.25, 9.0)
    """
    parts, columns = grad_w_partial.shape[0], weight_hidden.numel()
    if nonempty(grad_w_partial):
        _REDUCE.launch(
            (dtype_name(weight_hidden), columns, parts, _vector(4, columns, grad_w_partial)),
            grad_w_partial.view(parts, columns), weight_hidden.view(-1), weight_embed.view(-1),
            grad_weight_hidden.view(-1), grad_weight_embed.view(-1),
        )  # fmt: skip
