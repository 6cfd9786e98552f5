"""`fused_weight`: the product of the weights of the two norms that the gate compares."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.weight import reference
from tile_kernels.engram.weight.plan import plan
from tile_kernels.engram.weights import access_width, check_weights
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_PRODUCT = Kernel("tile_kernels.engram.weight.kernel", "product", plan)


class Arguments(NamedTuple):
    weight_hidden: Tensor
    weight_embed: Tensor

    def check(self) -> None:
        check_weights(self.weight_hidden, self.weight_embed)

    def outputs(self) -> Out:
        return Out("out", self.weight_hidden.shape, torch.float32)

    def launches(self, out: Spec) -> Launch:
        vector = access_width(8, out.numel(), *self)
        problem = (dtype_name(self.weight_hidden), vector)
        return Launch(_PRODUCT, problem, tuple(x.view(-1) for x in (*self, out)))


def cost(weight_hidden: Tensor, weight_embed: Tensor) -> Cost:  # noqa: ARG001
    return Cost(weight_hidden.numel() * (2 * weight_hidden.element_size() + 4))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    weight_hidden, weight_embed = ctx.saved_tensors
    return grad * weight_embed, grad * weight_hidden


FUSED_WEIGHT = Operator(
    "engram.fused_weight",
    Arguments,
    reference=reference.fused_weight,
    cost=cost,
    backward=_backward,
    setup_context=_save,
)


@FUSED_WEIGHT.public()
def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """Multiplies the weights of the two norms of the gate.

    The product of bfloat16 weights is exact. It is differentiable; `grad_w_reduce` applies its rule
    to partial sums.

    Args:
        weight_hidden: `[hc, hidden]`, bfloat16 or float32, contiguous.
        weight_embed: `[hc, hidden]`, dtype of `weight_hidden`, contiguous.

    Returns:
        `[hc, hidden]`, float32, contiguous.

    Raises:
        TypeError: If a weight has another dtype.
        ValueError: If a weight has another shape, or is not contiguous.

    Example:
        >>> fused_weight(torch.tensor([[1.5]]).bfloat16(), torch.tensor([[-2.25]]).bfloat16())
        tensor([[-3.3750]])
    """
    return FUSED_WEIGHT(weight_hidden, weight_embed)
