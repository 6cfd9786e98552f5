"""How often experts or groups are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.counting import AUX_FI, GROUP_COUNT
from tile_kernels.runtime import checks, tickets
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import op

MOST_GROUPS = 8192  # a histogram in the shared memory of the smallest supported GPU
MOST_CHUNKS = 128  # blocks, with one histogram each

_KERNEL = Kernel("tile_kernels.moe.kernels.counting", "group_count")


def _check_indices(name: str, indices: Tensor) -> None:
    checks.tensor(name, indices, ("num_tokens", "num_topk"), torch.int64, contiguous=True)
    checks.countable(name, indices)


def _check_group_count(group_idx: Tensor, num_groups: int) -> None:
    _check_indices("group_idx", group_idx)
    checks.integer("num_groups", num_groups, 1, MOST_GROUPS)


def _check_aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> None:
    _check_indices("topk_idx", topk_idx)
    checks.integer("num_experts", num_experts, 1, MOST_GROUPS)
    checks.integer("num_aux_topk", num_aux_topk, 1, 2**31 - 1)


def _launch(indices: Tensor, result: Tensor, as_fraction: bool, slots: float) -> Tensor:
    num_groups = result.shape[0]
    counts = indices.new_empty((MOST_CHUNKS, num_groups), dtype=torch.int32)
    counters, ticket = tickets.take(indices.device)
    problem = (num_groups, indices.numel(), as_fraction)
    _KERNEL.launch(problem, indices.view(-1), counts, result, counters, ticket, slots)
    return result


@op(
    check=_check_group_count,
    oracle=oracles.group_count,
    cost=lambda group_idx, num_groups: Cost(8 * group_idx.numel() + 4 * num_groups),
    cases=GROUP_COUNT,
    values=lambda group_idx, num_groups: checks.in_range(
        "group_idx", group_idx, -1, num_groups - 1
    ),
    differentiable=False,
)
def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """How often each group is chosen.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `group_idx` | `[num_tokens, num_topk]` | int64 | contiguous |
    | `num_groups` | | int in `1..8192` | |
    | returns | `[num_groups]` | int32 | contiguous |

    Entries outside `0..num_groups-1` (-1 is the padding) are not counted; repeats within a row are.

    Raises `TypeError` on another dtype, `ValueError` on another rank, a non-contiguous tensor or
    `num_groups` out of range.

    >>> group_count(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4).tolist()
    [1, 3, 1, 0]
    """
    if not nonempty(group_idx):
        return group_idx.new_zeros((num_groups,), dtype=torch.int32)
    counts = group_idx.new_empty((num_groups,), dtype=torch.int32)
    return _launch(group_idx, counts, False, 1.0)


@op(
    check=_check_aux_fi,
    oracle=oracles.aux_fi,
    cost=lambda topk_idx, num_experts, num_aux_topk: Cost(  # noqa: ARG005
        8 * topk_idx.numel() + 4 * num_experts
    ),
    cases=AUX_FI,
    values=lambda topk_idx, num_experts, num_aux_topk: checks.in_range(  # noqa: ARG005
        "topk_idx", topk_idx, -1, num_experts - 1
    ),
    differentiable=False,
)
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """The load of each expert relative to an even one, for the balance loss.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `topk_idx` | `[num_tokens, num_topk]` | int64 | contiguous |
    | `num_experts` | | int in `1..8192` | |
    | `num_aux_topk` | | int, at least 1 | |
    | returns | `[num_experts]` | float32 | contiguous |

    `f[e] = count[e] * num_experts / (num_tokens * num_aux_topk)`: integer counts, then one product
    and one division in float32, so the result does not depend on any order. Masked rows count as
    tokens; entries outside `0..num_experts-1` are not counted. Without tokens it is zero.

    Raises as `group_count` does.

    >>> aux_fi(torch.tensor([[0, 1], [1, 2], [1, -1]]), 4, 2)[1].item()
    2.0
    """
    if not nonempty(topk_idx):
        return topk_idx.new_zeros((num_experts,), dtype=torch.float32)
    fraction = topk_idx.new_empty((num_experts,), dtype=torch.float32)
    return _launch(topk_idx, fraction, True, float(topk_idx.shape[0] * num_aux_topk))
