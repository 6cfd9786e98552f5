"""`topk_gate` and `topk_sum_and_topk_group_idx`: the best experts or expert groups of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.arguments import check_scores
from tile_kernels.moe.plan import MAX_GROUPS
from tile_kernels.moe.topk import reference
from tile_kernels.moe.topk.plan import (
    MAX_EXPERTS,
    MAX_WARP_EXPERTS,
    MAX_WARP_TOPK,
    plan_block,
    plan_groups,
    plan_select,
    plan_warp,
    plan_wide,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MODULE = "tile_kernels.moe.topk.kernel"
_WARP = Kernel(_MODULE, "topk_gate_warp", plan_warp)
_WIDE = Kernel(_MODULE, "topk_gate_wide", plan_wide)
_BLOCK = Kernel(_MODULE, "topk_gate_block", plan_block)
_SELECT = Kernel(_MODULE, "topk_gate_select", plan_select)
_GROUPS = Kernel(_MODULE, "topk_group", plan_groups)


# ---- experts ------------------------------------------------------------------------------------


class GateArguments(NamedTuple):
    scores: Tensor
    num_topk: int

    def check(self) -> None:
        check_scores("scores", self.scores, MAX_EXPERTS)
        num_experts = self.scores.shape[1]
        checks.integer("num_topk", self.num_topk, 1, num_experts, because="(the number of experts)")

    def outputs(self) -> Out:
        return Out("topk_idx", (self.scores.shape[0], self.num_topk), torch.int64)

    def launches(self, topk_idx: Spec) -> Launch | None:
        if self.scores.numel() == 0:
            return None
        num_experts = self.scores.shape[1]
        if self.num_topk > MAX_WARP_TOPK:
            # A sort of the chosen experts is worth their choice if it is half as long.
            kernel = _SELECT if 2 * self.num_topk <= num_experts else _BLOCK
        else:
            kernel = _WARP if num_experts <= MAX_WARP_EXPERTS else _WIDE
        return Launch(
            kernel, (num_experts, self.num_topk, alignment(self.scores)), (self.scores, topk_idx)
        )


def gate_cost(scores: Tensor, num_topk: int) -> Cost:
    num_tokens, num_experts = scores.shape
    return Cost(bytes=4 * num_tokens * num_experts + 8 * num_tokens * num_topk)


TOPK_GATE = Operator(
    "moe.topk_gate",
    GateArguments,
    reference=reference.stable_topk,
    cost=gate_cost,
    dynamic={"scores": 1},
    differentiable=False,
)


@TOPK_GATE.public()
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """Finds the best experts of each token, best first, ties to the smaller expert index.

    The result is that of a stable descending sort: the indices of a row are always distinct, NaN
    (of either sign) ranks above `+inf`, `-inf` ranks last, `+0.0` and `-0.0` are equal.

    Args:
        scores: `[num_tokens, num_experts]`, float32, contiguous; up to 8192 experts.
        num_topk: Experts per token, in `1..num_experts`. Above 32 a block takes a row, which is
            slower; above half of the experts it sorts all of them, which is much slower.

    Returns:
        `[num_tokens, num_topk]`, int64, contiguous, on `scores.device`.

    Raises:
        TypeError: If `scores` has another dtype.
        ValueError: If `scores` has another rank or is not contiguous, or if `num_topk` is out of
            range.

    Example:
        >>> topk_gate(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0]]), 7).tolist()
        [[1, 2, 4, 3, 0, 5, 6]]
    """
    return TOPK_GATE(scores, num_topk)


# ---- groups of experts --------------------------------------------------------------------------


class GroupArguments(NamedTuple):
    scores: Tensor
    num_topk_sum: int
    num_topk_groups: int

    def check(self) -> None:
        dims = ("num_tokens", "num_groups", "experts_per_group")
        checks.tensor("scores", self.scores, dims, torch.float32, contiguous=True)
        _, num_groups, group_size = self.scores.shape
        if not (1 <= num_groups <= MAX_GROUPS and 1 <= group_size <= MAX_EXPERTS):
            limits = f"1..{MAX_GROUPS} groups of 1..{MAX_EXPERTS} experts"
            raise ValueError(f"scores must have {limits}, got {num_groups} of {group_size}")
        checks.integer("num_topk_sum", self.num_topk_sum, 1, 2)
        if self.num_topk_sum > group_size:
            raise ValueError(
                f"num_topk_sum must be at most {group_size} (a group), got {self.num_topk_sum}"
            )
        limit = min(num_groups, MAX_WARP_TOPK)
        because = "(groups, and at most 32)"
        checks.integer("num_topk_groups", self.num_topk_groups, 1, limit, because=because)

    def outputs(self) -> Out:
        return Out("topk_group_idx", (self.scores.shape[0], self.num_topk_groups), torch.int64)

    def launches(self, topk_group_idx: Spec) -> Launch | None:
        if self.scores.numel() == 0:
            return None
        _, num_groups, group_size = self.scores.shape
        sizes = (num_groups, group_size, self.num_topk_sum, self.num_topk_groups)
        return Launch(_GROUPS, (*sizes, alignment(self.scores)), (self.scores, topk_group_idx))


def group_cost(scores: Tensor, num_topk_groups: int, **_: int) -> Cost:
    return Cost(bytes=4 * scores.numel() + 8 * scores.shape[0] * num_topk_groups)


def _group_reference(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """The reference under the public names of the arguments."""
    return reference.topk_sum_and_topk_group_idx(scores, num_topk_sum, num_topk_groups)


TOPK_GROUPS = Operator(
    "moe.topk_sum_and_topk_group_idx",
    GroupArguments,
    reference=_group_reference,
    cost=group_cost,
    dynamic={"scores": 2},
    differentiable=False,
)


@TOPK_GROUPS.public()
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """Finds the best expert groups of each token, by the sum of their one or two largest scores.

    Groups come best first, ties go to the smaller group; equal scores within a group count
    separately. The two largest are added in float32. NaN is the largest score, and a group whose
    sum is NaN ranks first.

    Args:
        scores: `[num_tokens, num_groups, experts_per_group]`, float32, contiguous; up to 64 groups
            of up to 8192 experts.
        num_topk_sum: Scores of a group that are added: 1 or 2, not above `experts_per_group`.
        num_topk_groups: Groups per token, in `1..num_groups` and at most 32.

    Returns:
        `[num_tokens, num_topk_groups]`, int64, contiguous.

    Raises:
        TypeError: If `scores` has another dtype.
        ValueError: If `scores` has another rank or is not contiguous, or if a number is out of
            range.

    Example:
        >>> groups = torch.tensor([[[1.0, 5.0], [3.0, 3.0], [4.0, 1.0], [0.0, 7.0]]])
        >>> topk_sum_and_topk_group_idx(groups, 2, 4).tolist()
        [[3, 0, 1, 2]]
    """
    return TOPK_GROUPS(scores, num_topk_sum, num_topk_groups)
