"""`grad_w_reduce`: the gradients of the two norms' weights, from partial sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.grad_w import reference
from tile_kernels.engram.grad_w.plan import Split, plan, split
from tile_kernels.engram.weights import access_width, check_weights
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Size, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_REDUCE = Kernel("tile_kernels.engram.grad_w.kernel", "reduce_gradients", plan)


class Arguments(NamedTuple):
    grad_w_partial: Tensor
    weight_hidden: Tensor
    weight_embed: Tensor
    grad_weight_hidden: Tensor
    grad_weight_embed: Tensor

    def check(self) -> None:
        check_weights(self.weight_hidden, self.weight_embed)
        shape = tuple(self.weight_hidden.shape)
        checks.tensor(
            "grad_w_partial", self.grad_w_partial, ("parts", "hc", "hidden"), torch.float32,
            shape=(None, *shape), contiguous=True,
        )  # fmt: skip
        named = list(self._asdict().items())
        read, written = named[:3], named[3:]
        for name, grad in written:
            checks.tensor(name, grad, ("hc", "hidden"), torch.float32, shape=shape, contiguous=True)
        checks.apart(written, read)

    def outputs(self) -> None:
        return None

    def launches(self) -> Launch | None:
        partial: Any = self.grad_w_partial
        if partial.numel() == 0:
            return None
        columns, parts = self.weight_hidden.numel(), Size(lambda a: a.grad_w_partial.shape[0])
        vector = access_width(4, columns, partial)
        problem = (dtype_name(self.weight_hidden), columns, parts, vector)

        def shares(a: Arguments) -> Split:
            return split(columns, a.grad_w_partial.shape[0], vector)

        warps, at_once = Size(lambda a: shares(a).warps), Size(lambda a: shares(a).at_once)
        arguments = (partial.view(-1, columns), *[x.view(-1) for x in self[1:]], warps, at_once)
        return Launch(_REDUCE, problem, arguments)


def cost(grad_w_partial: Tensor, weight_hidden: Tensor, **_: Any) -> Cost:
    per_weight = 2 * weight_hidden.element_size() + 16
    return Cost(4 * grad_w_partial.numel() + weight_hidden.numel() * per_weight)


GRAD_W_REDUCE = Operator(
    "engram.grad_w_reduce",
    Arguments,
    reference=reference.grad_w_reduce,
    cost=cost,
    dynamic={"grad_w_partial": 2},
    mutates=("grad_weight_hidden", "grad_weight_embed"),
    differentiable=False,
)


@GRAD_W_REDUCE.public()
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Adds the gradients of the weights of both norms to their buffers.

    With `S` the sum of the parts, `grad_weight_hidden += S * weight_embed` and
    `grad_weight_embed += S * weight_hidden`. The order of the sum is fixed, so the result is
    deterministic.

    Args:
        grad_w_partial: `[parts, hc, hidden]`, float32, contiguous, of `engram_gate_bwd`.
        weight_hidden: `[hc, hidden]`, bfloat16 or float32, contiguous.
        weight_embed: `[hc, hidden]`, dtype of `weight_hidden`, contiguous.
        grad_weight_hidden: `[hc, hidden]`, float32, contiguous. Written in place.
        grad_weight_embed: `[hc, hidden]`, float32, contiguous. Written in place.

    Raises:
        TypeError: If an argument has another dtype.
        ValueError: If an argument has another shape or is not contiguous, or a buffer shares memory
            with another argument.

    Example:
        >>> grad_hidden, grad_embed = torch.tensor([[10.0]]), torch.zeros(1, 1)
        >>> parts, weights = torch.tensor([[[1.0]], [[3.5]]]), torch.tensor([[[2.0]], [[0.5]]])
        >>> grad_w_reduce(parts, *weights, grad_hidden, grad_embed)
        >>> grad_hidden.item(), grad_embed.item()
        (12.25, 9.0)
    """
    GRAD_W_REDUCE(
        grad_w_partial, weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed
    )
