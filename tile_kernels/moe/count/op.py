"""`group_count`: how often each group is chosen. `aux_fi` (`moe/fi`) has the same kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.arguments import check_slots
from tile_kernels.moe.count import reference
from tile_kernels.moe.count.plan import MAX_CHUNKS, MAX_GROUPS, plan
from tile_kernels.runtime import checks, tickets
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.moe.count.kernel", "group_count", plan)


# ---- shared with aux_fi -------------------------------------------------------------------------


def check_indices(name: str, indices: Tensor) -> None:
    check_slots(name, indices)
    checks.countable(name, indices)


def chunk_counts(num_groups: int) -> Out:
    """The scratch buffer for the histograms of all blocks."""
    return Out("counts", (MAX_CHUNKS, num_groups), torch.int32)


def count_launch(
    indices: Any,
    result: Spec,
    counts: Spec,
    as_fraction: bool,
    num_slots: Size | float,
) -> Launch | Host:
    """Counts, or with `as_fraction` counts times the number of groups over `num_slots`."""
    if indices.numel() == 0:
        return Host(Tensor.zero_, (result,))
    counters, ticket = tickets.counter(indices)
    problem = (result.shape[0], as_fraction)
    arguments = (indices.view(-1), counts, result, counters, ticket, num_slots)
    return Launch(_KERNEL, problem, arguments)


# ---- group_count --------------------------------------------------------------------------------


class Arguments(NamedTuple):
    group_idx: Tensor
    num_groups: int

    def check(self) -> None:
        check_indices("group_idx", self.group_idx)
        checks.integer("num_groups", self.num_groups, 1, MAX_GROUPS)

    def outputs(self) -> Out:
        return Out("count", (self.num_groups,), torch.int32)

    def launches(self, count: Spec, counts: Spec) -> Launch | Host:
        return count_launch(self.group_idx, count, counts, False, 1.0)

    def scratch(self) -> tuple[Out, ...]:
        return (chunk_counts(self.num_groups),)

    def check_values(self) -> None:
        checks.in_range("group_idx", self.group_idx, -1, self.num_groups - 1)


def cost(group_idx: Tensor, num_groups: int) -> Cost:
    return Cost(8 * group_idx.numel() + 4 * num_groups)


GROUP_COUNT = Operator(
    "moe.group_count",
    Arguments,
    reference=reference.group_count,
    cost=cost,
    dynamic={"group_idx": 1},
    differentiable=False,
)


@GROUP_COUNT.public()
def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """Counts how often each group is chosen.

    Entries outside `0..num_groups-1` (-1 is the padding) are not counted; repeats within a row are.

    Args:
        group_idx: `[num_tokens, num_topk]`, int64, contiguous.
        num_groups: The number of groups, in `1..8192`.

    Returns:
        `[num_groups]`, int32, contiguous.

    Raises:
        TypeError: If `group_idx` has another dtype.
        ValueError: If `group_idx` has another rank or is not contiguous, or if `num_groups` is out
            of range.

    Example:
        >>> group_count(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4).tolist()
        [1, 3, 1, 0]
    """
    return GROUP_COUNT(group_idx, num_groups)
