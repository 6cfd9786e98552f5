"""Expert gates: which experts a token goes to."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.gating import TOPK_GATE, TOPK_GROUP
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import op

MOST_EXPERTS = 8192  # one row of sort keys in the shared memory of the smallest supported GPU
MOST_WARP_EXPERTS = 512  # beyond that several warps share a token
MOST_WARP_TOPK = 32  # one pick per lane

_WARP = Kernel("tile_kernels.moe.kernels.gating", "topk_gate_warp")
_WIDE = Kernel("tile_kernels.moe.kernels.gating", "topk_gate_wide")
_BLOCK = Kernel("tile_kernels.moe.kernels.gating", "topk_gate_block")


def _check_topk_gate(scores: Tensor, num_topk: int) -> None:
    checks.tensor("scores", scores, ("num_tokens", "num_experts"), torch.float32, contiguous=True)
    num_experts = scores.shape[1]
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"scores must have 1..{MOST_EXPERTS} experts, got {num_experts}")
    checks.integer("num_topk", num_topk, 1, num_experts, because="(the number of experts)")


def _cost_topk_gate(scores: Tensor, num_topk: int) -> Cost:
    num_tokens, num_experts = scores.shape
    return Cost(bytes=4 * num_tokens * num_experts + 8 * num_tokens * num_topk)


@op(
    check=_check_topk_gate,
    oracle=oracles.stable_topk,
    cost=_cost_topk_gate,
    cases=TOPK_GATE,
    differentiable=False,
)
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """The best experts of each token, best first, ties to the smaller expert index.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `scores` | `[num_tokens, num_experts]` | float32 | contiguous |
    | `num_topk` | | int in `1..num_experts` | |
    | returns | `[num_tokens, num_topk]` | int64 | contiguous, on `scores.device` |

    The result is that of a stable descending sort: the indices of a row are always distinct,
    NaN (of either sign) ranks above `+inf`, `-inf` ranks last, `+0.0` and `-0.0` are equal. Up to
    8192 experts. `num_topk` above 32 sorts whole rows and is much slower.

    Raises `TypeError` on another dtype, `ValueError` on another rank, a non-contiguous tensor or
    `num_topk` out of range.

    >>> topk_gate(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0]]), 7).tolist()
    [[1, 2, 4, 3, 0, 5, 6]]
    """
    num_tokens, num_experts = scores.shape
    topk_idx = scores.new_empty((num_tokens, num_topk), dtype=torch.int64)
    if nonempty(scores):
        if num_topk > MOST_WARP_TOPK:
            kernel = _BLOCK
        else:
            kernel = _WARP if num_experts <= MOST_WARP_EXPERTS else _WIDE
        kernel.launch((num_experts, num_topk, alignment(scores)), scores, topk_idx)
    return topk_idx


MOST_GROUPS = 64  # two per lane of a warp

_GROUPS = Kernel("tile_kernels.moe.kernels.gating", "topk_group")


def _check_groups(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> None:
    dims = ("num_tokens", "num_groups", "experts_per_group")
    checks.tensor("scores", scores, dims, torch.float32, contiguous=True)
    _, num_groups, group_size = scores.shape
    if not (1 <= num_groups <= MOST_GROUPS and 1 <= group_size <= MOST_EXPERTS):
        limits = f"1..{MOST_GROUPS} groups of 1..{MOST_EXPERTS} experts"
        raise ValueError(f"scores must have {limits}, got {num_groups} of {group_size}")
    checks.integer("num_topk_sum", num_topk_sum, 1, 2)
    if num_topk_sum > group_size:
        raise ValueError(f"num_topk_sum must be at most {group_size} (a group), got {num_topk_sum}")
    most = min(num_groups, MOST_WARP_TOPK)
    checks.integer("num_topk_groups", num_topk_groups, 1, most, because="(groups, and at most 32)")


def _cost_groups(scores: Tensor, num_topk_groups: int, **_: int) -> Cost:
    return Cost(bytes=4 * scores.numel() + 8 * scores.shape[0] * num_topk_groups)


def _oracle_groups(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    return oracles.topk_sum_and_topk_group_idx(scores, num_topk_sum, num_topk_groups)


@op(
    check=_check_groups,
    oracle=_oracle_groups,
    cost=_cost_groups,
    cases=TOPK_GROUP,
    differentiable=False,
)
def topk_sum_and_topk_group_idx(scores: Tensor, num_topk_sum: int, num_topk_groups: int) -> Tensor:
    """The best expert groups of each token, by the sum of each group's one or two largest scores.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `scores` | `[num_tokens, num_groups, experts_per_group]` | float32 | contiguous |
    | `num_topk_sum` | | 1 or 2, not above `experts_per_group` | |
    | `num_topk_groups` | | int in `1..num_groups`, at most 32 | |
    | returns | `[num_tokens, num_topk_groups]` | int64 | contiguous |

    Groups come best first, ties go to the smaller group; equal scores within a group count
    separately. The two largest are added in float32. NaN is the largest score, and a group whose
    sum is NaN ranks first. Up to 64 groups of up to 8192 experts.

    Raises `TypeError` on another dtype, `ValueError` on another rank, a non-contiguous tensor or
    numbers out of range.

    >>> groups = torch.tensor([[[1.0, 5.0], [3.0, 3.0], [4.0, 1.0], [0.0, 7.0]]])
    >>> topk_sum_and_topk_group_idx(groups, 2, 4).tolist()
    [[3, 0, 1, 2]]
    """
    num_tokens, num_groups, group_size = scores.shape
    group_idx = scores.new_empty((num_tokens, num_topk_groups), dtype=torch.int64)
    if nonempty(scores):
        static = (num_groups, group_size, num_topk_sum, num_topk_groups)
        _GROUPS.launch((*static, alignment(scores)), scores, group_idx)
    return group_idx
