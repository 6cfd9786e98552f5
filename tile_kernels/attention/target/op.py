"""`attention_target`: the attention that chosen entries get, which the indexer learns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention import softmax
from tile_kernels.attention.softmax_plan import HOPPER
from tile_kernels.attention.target import reference
from tile_kernels.attention.target.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.attention.target.kernel", "summed_weights", plan)


class Arguments(NamedTuple):
    q: Tensor
    kv: Tensor
    indices: Tensor
    lse_full: Tensor
    sm_scale: float
    normalize: bool

    def check(self) -> None:
        softmax.check_lists(self.q, self.kv, self.indices, self.sm_scale, None, None)
        heads = tuple(self.q.shape[:2])
        checks.tensor("lse_full", self.lse_full, ("T", "h"), torch.float32, shape=heads)
        checks.boolean("normalize", self.normalize)

    def check_values(self) -> None:
        softmax.check_list_values(self.kv, self.indices, None)

    def outputs(self) -> Out:
        return Out("p", self.indices.shape, torch.float32)

    def launches(self, p: Spec) -> Launch | Host:
        if 0 in (self.kv.numel(), self.indices.numel()):
            return Host(Tensor.zero_, (p,))
        tensors = (softmax.dense(x) for x in (self.q, self.kv, self.indices, self.lse_full))
        problem = (self.q.shape[2], self.q.shape[1], bool(self.normalize))
        return Launch(_KERNEL, problem, (*tensors, p, float(self.sm_scale)))


def cost(q: Tensor, kv: Tensor, indices: Tensor, **_: Any) -> Cost:
    return Cost(
        2 * q.numel() + 2 * min(kv.numel(), indices.numel() * q.shape[2]) + 8 * indices.numel(),
        2 * indices.numel() * q.shape[1] * q.shape[2],
    )


def _reference(*values: Any) -> Tensor:
    *arguments, normalize = values
    return reference.attention_target(*arguments, normalize=normalize)


ATTENTION_TARGET = Operator(
    "attention.attention_target",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic={"q": 2, "kv": 1, "indices": 0, "lse_full": 0},
    archs=(HOPPER,),
)


@ATTENTION_TARGET.public(reference=reference.attention_target)
def attention_target(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse_full: Tensor,
    sm_scale: float,
    *,
    normalize: bool = True,
) -> Tensor:
    """Computes the share of attention of each selected entry: the training target of the indexer.

        P[t, j] = sum over h of exp(sm_scale * q[t, h] . kv[indices[t, j]] - lse_full[t, h])
        p[t, j] = P[t, j] / sum over j of P[t, j]

    The softmax is the joint one of the layer: `lse_full` has all rows that the query attends to,
    the window and the sink included, while `indices` has the entries alone. Products have bfloat16
    operands and float32 sums; heads are added in a fixed order. Results of a query do not depend on
    others. They have no gradient, as the target is constant for the indexer: detach `q` and `kv`,
    or call it under `torch.no_grad()`.

    Args:
        q: `[T, h, d]`, bfloat16, as in `sparse_attention`.
        kv: `[N, d]` or `[N, 1, d]`, bfloat16, as in `sparse_attention`.
        indices: `[T, k]` or `[T, 1, k]`, int32: rows of `kv`. One outside of `0..N - 1` has the
            weight 0.
        lse_full: `[T, h]`, float32: `logaddexp(lse, sink)` of `sparse_attention`, `inf` for a query
            without a row.
        sm_scale: The factor of logits, positive and finite.
        normalize: False returns `P`: ranks with different heads add theirs up, then normalize.

    Returns:
        `p [T, k]`, float32: each query's sum is 1, or 0 if it has no entry.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or `sm_scale` is not positive and
            finite.

    Example:
        >>> q, kv = torch.zeros(1, 2, 512).bfloat16(), torch.ones(4, 512).bfloat16()
        >>> indices = torch.tensor([[3, 0, -1]], dtype=torch.int32)
        >>> attention_target(q, kv, indices, torch.zeros(1, 2), 1.0).tolist()
        [[0.5, 0.5, 0.0]]
    """
    kv, indices = softmax.without_kv_head(ATTENTION_TARGET, kv, indices)
    return ATTENTION_TARGET(q, kv, indices, lse_full, sm_scale, normalize)
