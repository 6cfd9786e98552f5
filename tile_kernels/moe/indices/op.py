"""`mask_indices_by_tp` and `inplace_unique_group_indices`: expert indices as ranks need them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.arguments import check_slots
from tile_kernels.moe.indices import reference
from tile_kernels.moe.indices.plan import MAX_UNIQUE_COLUMNS, plan_mask, plan_unique
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MASK = Kernel("tile_kernels.moe.indices.kernel", "mask_indices_by_tp", plan_mask)
_UNIQUE = Kernel("tile_kernels.moe.indices.kernel", "unique_indices", plan_unique)


# ---- indices of a tensor-parallel rank ----------------------------------------------------------


class MaskArguments(NamedTuple):
    indices: Tensor
    n: int
    num_ep_ranks: int
    tp_rank: int
    num_tp_ranks: int

    def check(self) -> None:
        check_slots("indices", self.indices, (torch.int64, torch.int32))
        checks.countable("indices", self.indices)
        checks.integer("num_ep_ranks", self.num_ep_ranks, 1)
        checks.integer(
            "n", self.n, self.num_ep_ranks, 2**31 - 1, because="(an expert per rank at least)"
        )
        checks.integer("num_tp_ranks", self.num_tp_ranks, 1, 2**31 - 1)
        checks.integer("tp_rank", self.tp_rank, -(2**31), 2**31 - 1)

    def outputs(self) -> Out:
        return Out("masked", self.indices.shape, self.indices.dtype)

    def launches(self, masked: Spec) -> Launch | None:
        indices: Any = self.indices
        if indices.numel() == 0:
            return None
        problem = (
            dtype_name(indices), self.n // self.num_ep_ranks, self.num_tp_ranks, indices.shape[1],
            Size(lambda a: a.indices.numel()), alignment(indices),
        )  # fmt: skip
        return Launch(_MASK, problem, (indices.view(-1), masked.view(-1), self.tp_rank))


def mask_cost(indices: Tensor, **_: int) -> Cost:
    return Cost(bytes=2 * indices.numel() * indices.element_size())


MASK_INDICES_BY_TP = Operator(
    "moe.mask_indices_by_tp",
    MaskArguments,
    reference=reference.mask_indices_by_tp,
    cost=mask_cost,
    dynamic={"indices": 1},
    differentiable=False,
)


@MASK_INDICES_BY_TP.public()
def mask_indices_by_tp(
    indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> Tensor:
    """Converts experts to the local numbers of a tensor-parallel rank; others become -1.

    With `q = n // num_ep_ranks` experts per rank, index `v` lies on rank `e = v // q`. If
    `e % num_tp_ranks == tp_rank` it becomes `e // num_tp_ranks * q + v % q`, else -1. Negative
    indices become -1; indices from `n` on follow the formula.

    Args:
        indices: `[num_tokens, num_topk]`, int64 or int32, contiguous.
        n: The number of experts of all ranks, at least `num_ep_ranks`.
        num_ep_ranks: The number of expert-parallel ranks, at least 1.
        tp_rank: This tensor-parallel rank. Outside `0..num_tp_ranks-1` every index becomes -1.
        num_tp_ranks: The number of tensor-parallel ranks, at least 1.

    Returns:
        Shape and dtype of `indices`, contiguous.

    Raises:
        TypeError: If `indices` has another dtype.
        ValueError: If `indices` has another rank or is not contiguous, if there are fewer experts
            than ranks, or if a number of ranks is below 1.

    Example:
        >>> mask_indices_by_tp(torch.tensor([[-1, 0, 3, 4, 8]]), 24, 6, 0, 2).tolist()
        [[-1, 0, 3, -1, 4]]
    """
    return MASK_INDICES_BY_TP(indices, n, num_ep_ranks, tp_rank, num_tp_ranks)


# ---- repeats within a row -----------------------------------------------------------------------


class UniqueArguments(NamedTuple):
    group_indices: Tensor
    num_groups: int

    def check(self) -> None:
        check_slots("group_indices", self.group_indices)
        columns = self.group_indices.shape[1]
        if columns > MAX_UNIQUE_COLUMNS:
            raise ValueError(
                f"group_indices must have at most {MAX_UNIQUE_COLUMNS} columns, got {columns}"
            )
        checks.integer("num_groups", self.num_groups, 1)

    def outputs(self) -> None:
        return None

    def launches(self) -> Launch | None:
        indices, columns = self.group_indices, self.group_indices.shape[1]
        if indices.numel() == 0 or columns == 1:
            return None
        return Launch(_UNIQUE, (columns, alignment(indices)), (indices,))

    def check_values(self) -> None:
        checks.in_range("group_indices", self.group_indices, -1, self.num_groups - 1)


def unique_cost(group_indices: Tensor, **_: int) -> Cost:
    return Cost(8 * group_indices.numel())


INPLACE_UNIQUE_GROUP_INDICES = Operator(
    "moe.inplace_unique_group_indices",
    UniqueArguments,
    reference=reference.inplace_unique_group_indices,
    cost=unique_cost,
    dynamic={"group_indices": 1},
    mutates=("group_indices",),
    differentiable=False,
)


@INPLACE_UNIQUE_GROUP_INDICES.public()
def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:
    """Replaces later repeats of an index within a row by -1, in place.

    First occurrences stay where they are, and so does -1. Any value is allowed.

    Args:
        group_indices: `[num_tokens, num_topk]`, int64, contiguous, up to 64 columns; written.
        num_groups: The number of groups, at least 1. Only the checked mode compares the indices
            with it.

    Raises:
        TypeError: If `group_indices` has another dtype.
        ValueError: If `group_indices` has another rank, is not contiguous or has too many columns.

    Example:
        >>> rows = torch.tensor([[3, 1, 3, -1, 1, 3]])
        >>> inplace_unique_group_indices(rows, 128)
        >>> rows.tolist()
        [[3, 1, -1, -1, -1, -1]]
    """
    INPLACE_UNIQUE_GROUP_INDICES(group_indices, num_groups)
