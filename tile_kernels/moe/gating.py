"""Expert gates: which experts a token goes to."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases import TOPK_GATE
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
