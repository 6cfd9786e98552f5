"""What the declarations of several gates, and the layers built on them, share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.moe.plan import MAX_GROUPS, MAX_SLOTS
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Out


def check_scoring(scoring_func: str) -> None:
    """Refuses what is not the name of a `ScoringFunc` that scores."""
    if not isinstance(scoring_func, str):
        raise TypeError(f"scoring_func must be a str, got {type(scoring_func).__name__}")
    try:
        known = ScoringFunc.from_str(scoring_func) is not ScoringFunc.IDENTITY
    except ValueError:
        known = False
    if not known:
        allowed = "sigmoid, sqrtsoftplus or softmax"
        raise ValueError(f"scoring_func must be {allowed}, got {scoring_func!r}")


def check_groups(num_experts: int, num_topk: int, num_topk_groups: int, num_groups: int) -> None:
    """Refuses bad groups of experts; as many groups kept as there are means no groups."""
    checks.integer("num_groups", num_groups, 0)
    checks.integer("num_topk_groups", num_topk_groups, 0, num_groups, because="(the groups)")
    if num_groups == num_topk_groups:
        return  # not grouped
    if num_groups > MAX_GROUPS or num_topk_groups > MAX_SLOTS:
        limits = f"{MAX_SLOTS} of {MAX_GROUPS}"
        given = f"{num_topk_groups} of {num_groups}"
        raise ValueError(f"num_topk_groups of num_groups must be at most {limits}, got {given}")
    if num_topk_groups == 0:
        raise ValueError(f"num_topk_groups must be at least 1 with {num_groups} groups, got 0")
    if num_experts % num_groups:
        raise ValueError(
            f"num_groups must divide the number of experts {num_experts}, got {num_groups}"
        )
    if num_topk > num_experts // num_groups * num_topk_groups:
        kept = f"{num_topk_groups} groups of {num_experts // num_groups} experts"
        raise ValueError(f"num_topk must be at most the experts of {kept}, got {num_topk}")


def check_mask(mask: Tensor | None, num_tokens: int) -> None:
    """Refuses a mask that does not have one bool for each token; its shape does not matter."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
    checks.tensor("mask", mask, ("num_tokens",) * max(mask.dim(), 1), torch.bool)
    if mask.numel() != num_tokens or not mask.is_contiguous():
        raise ValueError(
            f"mask must have {num_tokens} elements, contiguous, got shape {tuple(mask.shape)}"
        )


def _check_map(
    num_logical: int, num_shared: int, to_physical_map: Tensor | None, logical_count: Tensor | None
) -> int:
    """Returns the number of extra physical experts."""
    if (to_physical_map is None) != (logical_count is None):
        raise ValueError("to_physical_map and logical_count must be given together")
    if to_physical_map is None:
        if num_shared:
            raise ValueError("to_physical_map must be given to use shared experts as routed")
        return 0
    checks.tensor(
        "to_physical_map", to_physical_map, ("num_logical", "columns"), torch.int32,
        shape=(num_logical, None), contiguous=True,
    )  # fmt: skip
    checks.tensor(
        "logical_count", logical_count, ("num_logical",), torch.int32,
        shape=(num_logical,), contiguous=True,
    )  # fmt: skip
    extra = to_physical_map.shape[1] - 1
    if extra < num_shared:
        columns = to_physical_map.shape[1]
        raise ValueError(
            f"to_physical_map must have at least {num_shared + 1} columns for {num_shared} shared "
            f"experts, got {columns}"
        )
    return extra


# ---- records of gates ---------------------------------------------------------------------------
# `a` is the record of a gate: with `logits`, `num_topk`, `num_shared`, the map and the ranks.


def check_numbering(a: Any) -> None:
    """Refuses bad ranks and bad maps from logical to physical experts."""
    num_experts = a.logits.shape[1]
    checks.integer("ep_rank", a.ep_rank, 0, 2**31 - 1)
    checks.integer("num_ep_ranks", a.num_ep_ranks, 1)
    checks.integer("tp_rank", a.tp_rank, -(2**31), 2**31 - 1)
    checks.integer("num_tp_ranks", a.num_tp_ranks, 1, 2**31 - 1)
    num_logical = num_experts + a.num_shared
    extra = _check_map(num_logical, a.num_shared, a.to_physical_map, a.logical_count)
    if num_experts + extra < a.num_ep_ranks:
        experts, given = num_experts + extra, a.num_ep_ranks
        raise ValueError(f"num_ep_ranks must be at most the {experts} experts, got {given}")


def check_map_values(a: Any) -> None:
    """Refuses counts of replicas that exceed the map, and replicas in use that do not exist."""
    if a.to_physical_map is None:
        return
    columns = a.to_physical_map.shape[1]
    checks.in_range("logical_count", a.logical_count, 1, columns)
    used = torch.arange(columns, device=a.to_physical_map.device) < a.logical_count[:, None]
    physical = torch.where(used, a.to_physical_map, -1)
    checks.in_range("to_physical_map", physical, -1, a.logits.shape[1] + columns - 2)


def gate_outputs(a: Any) -> tuple[Out, Out]:
    """The indices of a token's experts, shared ones included, and their weights."""
    shape = (a.logits.shape[0], a.num_topk + a.num_shared)
    return Out("topk_idx", shape, torch.int64), Out("topk_weights", shape, torch.float32)


def flat_mask(a: Any) -> Any:
    """The mask with one dimension, or None."""
    return None if a.mask is None else a.mask.view(-1)


def gate_numbers(a: Any) -> tuple[float, int, int, int, int]:
    """The scalars of a gate's kernel: the factor of the weights and the ranks."""
    extra = 0 if a.to_physical_map is None else a.to_physical_map.shape[1] - 1
    per_rank = (a.logits.shape[1] + extra) // a.num_ep_ranks
    return float(a.routed_scaling_factor), a.ep_rank, per_rank, a.tp_rank, a.num_tp_ranks
