"""`aux_fi`: the load of each expert, for the balance loss. It has the kernel of `group_count`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.count.op import check_indices, chunk_counts, count_launch
from tile_kernels.moe.count.plan import MAX_GROUPS
from tile_kernels.moe.fi import reference
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.operator import Operator


class Arguments(NamedTuple):
    topk_idx: Tensor
    num_experts: int
    num_aux_topk: int

    def check(self) -> None:
        check_indices("topk_idx", self.topk_idx)
        checks.integer("num_experts", self.num_experts, 1, MAX_GROUPS)
        checks.integer("num_aux_topk", self.num_aux_topk, 1, 2**31 - 1)

    def outputs(self) -> Out:
        return Out("load", (self.num_experts,), torch.float32)

    def launches(self, load: Spec, counts: Spec) -> Launch | Host:
        num_slots = Size(lambda a: float(a.topk_idx.shape[0] * a.num_aux_topk))
        return count_launch(self.topk_idx, load, counts, True, num_slots)

    def scratch(self) -> tuple[Out, ...]:
        return (chunk_counts(self.num_experts),)

    def check_values(self) -> None:
        checks.in_range("topk_idx", self.topk_idx, -1, self.num_experts - 1)


def cost(topk_idx: Tensor, num_experts: int, **_: int) -> Cost:
    return Cost(8 * topk_idx.numel() + 4 * num_experts)


AUX_FI = Operator(
    "moe.aux_fi",
    Arguments,
    reference=reference.aux_fi,
    cost=cost,
    dynamic={"topk_idx": 1},
    differentiable=False,
)


@AUX_FI.public()
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Computes the load of each expert relative to an even one, for the balance loss.

    `f[e] = count[e] * num_experts / (num_tokens * num_aux_topk)`: integer counts, then one product
    and one division in float32, so that the result does not depend on any order. Masked rows count
    as tokens; entries outside `0..num_experts-1` are not counted. Without tokens the result is
    zero.

    Args:
        topk_idx: `[num_tokens, num_topk]`, int64, contiguous.
        num_experts: The number of experts, in `1..8192`.
        num_aux_topk: The choices of a token that an even load distributes, at least 1.

    Returns:
        `[num_experts]`, float32, contiguous.

    Raises:
        TypeError: If `topk_idx` has another dtype.
        ValueError: If `topk_idx` has another rank or is not contiguous, or if a number is out of
            range.

    Example:
        >>> aux_fi(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4, 2)[1].item()
        2.0
    """
    return AUX_FI(topk_idx, num_experts, num_aux_topk)
