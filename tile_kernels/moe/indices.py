"""Expert indices as different ranks count them."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.indices import INPLACE_UNIQUE_GROUP_INDICES, MASK_INDICES_BY_TP
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import op

_KERNEL = Kernel("tile_kernels.moe.kernels.indices", "mask_indices_by_tp")
_UNIQUE = Kernel("tile_kernels.moe.kernels.indices", "unique_indices")
MOST_UNIQUE = 64  # a row in the registers of one thread

_DTYPES = {torch.int64: "int64", torch.int32: "int32"}


def _check(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> None:
    dims = ("num_tokens", "num_topk")
    checks.tensor("indices", indices, dims, tuple(_DTYPES), contiguous=True)
    checks.countable("indices", indices)
    checks.integer("num_ep_ranks", num_ep_ranks, 1)
    checks.integer("n", n, num_ep_ranks, 2**31 - 1, because="(an expert per rank at least)")
    checks.integer("num_tp_ranks", num_tp_ranks, 1, 2**31 - 1)
    checks.integer("tp_rank", tp_rank, -(2**31), 2**31 - 1)


def _cost(indices: Tensor, **_: int) -> Cost:
    return Cost(bytes=2 * indices.numel() * indices.element_size())


@op(
    check=_check,
    oracle=oracles.mask_indices_by_tp,
    cost=_cost,
    cases=MASK_INDICES_BY_TP,
    differentiable=False,
)
def mask_indices_by_tp(
    indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> Tensor:
    """Expert indices as one tensor-parallel rank counts them, -1 for those of other ranks.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `indices` | `[num_tokens, num_topk]` | int64 or int32 | contiguous |
    | `n` | | int, the experts of all ranks | |
    | `num_ep_ranks`, `num_tp_ranks` | | int, at least 1 | |
    | `tp_rank` | | int; outside `0..num_tp_ranks-1` everything becomes -1 | |
    | returns | as `indices` | as `indices` | contiguous |

    With `q = n // num_ep_ranks` experts per rank, index `v` lies on rank `e = v // q`. If
    `e % num_tp_ranks == tp_rank` it becomes `e // num_tp_ranks * q + v % q`, else -1. Negative
    indices become -1; indices from `n` on follow the formula.

    Raises `TypeError` on another dtype, `ValueError` on another rank, a non-contiguous tensor,
    fewer experts than ranks or a number of ranks below 1.

    >>> mask_indices_by_tp(torch.tensor([[-1, 0, 3, 4, 8]]), 24, 6, 0, 2).tolist()
    [[-1, 0, 3, -1, 4]]
    """
    masked = torch.empty_like(indices)
    if nonempty(indices):
        static = (_DTYPES[indices.dtype], n // num_ep_ranks, num_tp_ranks)
        problem = (*static, indices.shape[1], indices.numel(), alignment(indices))
        _KERNEL.launch(problem, indices.view(-1), masked.view(-1), tp_rank)
    return masked


def _check_unique(group_indices: Tensor, num_groups: int) -> None:
    dims = ("num_tokens", "num_topk")
    checks.tensor("group_indices", group_indices, dims, torch.int64, contiguous=True)
    if group_indices.shape[1] > MOST_UNIQUE:
        columns = group_indices.shape[1]
        raise ValueError(f"group_indices must have at most {MOST_UNIQUE} columns, got {columns}")
    checks.integer("num_groups", num_groups, 1)


@op(
    check=_check_unique,
    oracle=oracles.inplace_unique_group_indices,
    cost=lambda group_indices, num_groups: Cost(8 * group_indices.numel()),  # noqa: ARG005
    cases=INPLACE_UNIQUE_GROUP_INDICES,
    mutates=("group_indices",),
    values=lambda group_indices, num_groups: checks.in_range(
        "group_indices", group_indices, -1, num_groups - 1
    ),
    differentiable=False,
)
def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:  # noqa: ARG001
    """Later repeats of an index within a row become -1, in place.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `group_indices` | `[num_tokens, num_topk]`, up to 64 columns | int64 | contiguous, written |
    | `num_groups` | | int, at least 1 | |

    First occurrences stay where they are, and so does -1. Any value is allowed, so `num_groups`
    has no upper limit; it is there for the signature.

    Raises `TypeError` on another dtype, `ValueError` on another rank, a non-contiguous tensor or
    too many columns.

    >>> rows = torch.tensor([[3, 1, 3, -1, 1, 3]])
    >>> inplace_unique_group_indices(rows, 128)
    >>> rows.tolist()
    [[3, 1, -1, -1, -1, -1]]
    """
    if nonempty(group_indices) and group_indices.shape[1] > 1:
        problem = (group_indices.shape[1], alignment(group_indices))
        _UNIQUE.launch(problem, group_indices)
