"""Checks of arguments that most operators of the family take."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime import checks


def check_slots(
    name: str,
    x: Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...] = torch.int64,
    num_tokens: int | None = None,
    num_topk: int | None = None,
) -> None:
    """Refuses what is not contiguous `[num_tokens, num_topk]`, of these sizes where given."""
    shape = (num_tokens, num_topk)
    checks.tensor(name, x, ("num_tokens", "num_topk"), dtypes, shape=shape, contiguous=True)


def check_scores(name: str, x: Tensor, max_experts: int) -> None:
    """Refuses what is not contiguous float32 `[num_tokens, 1..max_experts]`."""
    checks.tensor(name, x, ("num_tokens", "num_experts"), torch.float32, contiguous=True)
    if not 1 <= x.shape[1] <= max_experts:
        raise ValueError(f"{name} must have 1..{max_experts} experts, got {x.shape[1]}")
