"""`indexer_kl`: the loss that trains the indexer to imitate the attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention.kl import reference
from tile_kernels.attention.kl.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.attention.kl.kernel", "divergence", plan)


class Arguments(NamedTuple):
    p: Tensor
    logits: Tensor

    def check(self) -> None:
        checks.tensor("p", self.p, ("T", "k"), torch.float32, contiguous=True)
        checks.tensor(
            "logits", self.logits, ("T", "k"), torch.float32, shape=tuple(self.p.shape),
            contiguous=True,
        )  # fmt: skip

    def outputs(self) -> tuple[Out, Out]:
        return (
            Out("loss", self.p.shape[:1], torch.float32),
            Out("grad_logits", self.p.shape, torch.float32),
        )

    def launches(self, loss: Spec, grad_logits: Spec) -> Launch | Host:
        if self.p.numel() == 0:
            return Host(Tensor.zero_, (loss,))
        return Launch(_KERNEL, (), (self.p, self.logits, loss, grad_logits))


def cost(p: Tensor, logits: Tensor) -> Cost:
    return Cost(12 * p.numel() + 4 * logits.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[None, Tensor]:
    if ctx.needs_input_grad[0]:
        raise RuntimeError("indexer_kl: the target p has no gradient; detach it")
    (grad_logits,) = ctx.saved_tensors
    return None, grad[:, None] * grad_logits


INDEXER_KL = Operator(
    "attention.indexer_kl",
    Arguments,
    reference=reference.indexer_kl,
    cost=cost,
    dynamic={"p": 0, "logits": 0},
    backward=_backward,
    setup_context=_save,
)


@INDEXER_KL.public()
def indexer_kl(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the divergence of the indexer's softmax over selected entries from a target.

        loss[t] = sum over j of p[t, j] * (log p[t, j] - log softmax(logits[t])[j])
        grad_logits[t, j] = softmax(logits[t])[j] - p[t, j]

    The Kullback-Leibler divergence, and its gradient for the logits; sums are in float32. A logit
    of `-inf` is of no entry. A query whose target is all zero, or that has no entry, has a loss and
    a gradient of zero. Results of a query do not depend on others. `loss` is differentiable with
    respect to `logits`; `grad_logits` is for those that call `indexer_logits_bwd` themselves.

    Args:
        p: `[T, k]`, float32, contiguous: the target, as `attention_target` returns it. It must be
            detached.
        logits: `[T, k]`, float32, contiguous: those of the indexer for the same entries.

    Returns:
        `(loss, grad_logits)`, float32: `[T]` and `[T, k]`.

    Raises:
        TypeError: If an argument is no tensor, or has another dtype.
        ValueError: If an argument has another shape, or is not contiguous.

    Example:
        >>> p, logits = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, 1.0, float("-inf")]])
        >>> [x.tolist() for x in indexer_kl(p, logits)]
        [[0.0], [[0.0, 0.0, 0.0]]]
    """
    return INDEXER_KL(p, logits)
