"""Where each token's copies lie in the rows of a grouped matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.mapping import GET_FUSED_MAPPING
from tile_kernels.moe.counting import MOST_CHUNKS
from tile_kernels.runtime import backends, checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.torch.mapping import (
    Mapping,
    finish_mapping,
    fused_mapping,
    most_expanded_tokens,
)

MOST_NUMBERS = 2**31 - 2**20  # results in all, counted in 32 bits, as are slots past the end
MOST_EXPERTS = 8192  # three counters for each in the shared memory of the smallest supported GPU

_KERNEL = Kernel("tile_kernels.moe.kernels.mapping", "fused_mapping")


def _check(topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int) -> None:
    dims = ("num_tokens", "num_topk")
    checks.tensor("topk_idx", topk_idx, dims, torch.int64, contiguous=True)
    if topk_idx.shape[1] < 1:
        raise ValueError("topk_idx must have at least one column, got 0")
    checks.integer("num_experts", num_experts, 1, MOST_EXPERTS)
    checks.integer("alignment", alignment, 1, 2**16)
    checks.integer("num_expanded_tokens", num_expanded_tokens, 0)
    size = 3 * num_expanded_tokens + topk_idx.numel() + 3 * num_experts + 1
    rows = most_expanded_tokens(topk_idx.numel(), num_experts, alignment)
    if isinstance(size, int) and max(size, rows) > MOST_NUMBERS:
        raise ValueError(
            f"topk_idx and num_expanded_tokens must give at most {MOST_NUMBERS} numbers, got "
            f"{max(size, rows)}"
        )


@op(
    check=_check,
    oracle=fused_mapping,
    cost=lambda topk_idx, num_experts, num_expanded_tokens, **_: Cost(
        12 * topk_idx.numel() + 12 * num_expanded_tokens + 12 * num_experts
    ),
    cases=GET_FUSED_MAPPING,
    values=lambda topk_idx, num_experts, *_, **__: checks.in_range(
        "topk_idx", topk_idx, -1, num_experts - 1
    ),
    differentiable=False,
    name="get_fused_mapping",
)
def _mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int
) -> Tensor:
    num_slots = topk_idx.numel()
    size = 3 * num_expanded_tokens + num_slots + 3 * num_experts + 1
    if not nonempty(topk_idx):
        flat = topk_idx.new_full((size,), -1, dtype=torch.int32)
        flat[3 * num_expanded_tokens :] = 0  # empty ranges, nothing dropped
        return flat
    flat = topk_idx.new_empty((size,), dtype=torch.int32)
    counts = topk_idx.new_empty((MOST_CHUNKS, num_experts), dtype=torch.int32)
    problem = (topk_idx.shape[1], num_experts, num_slots)
    _KERNEL.launch(problem, topk_idx.view(-1), counts, flat, num_expanded_tokens, alignment)
    return flat


def _check_face(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    overflow: Tensor | None = None,
) -> None:
    _check(topk_idx, num_experts, num_expanded_tokens, alignment)
    checks.boolean("force_no_sync", force_no_sync)
    if overflow is not None:
        checks.tensor("overflow", overflow, ("1",), torch.int32, shape=(1,))
        if overflow.device != topk_idx.device:
            raise ValueError(
                f"overflow must be on {topk_idx.device} as topk_idx is, got {overflow.device}"
            )


@face(_mapping, oracle=oracles.get_fused_mapping, check=_check_face, mutates=("overflow",))
def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    overflow: Tensor | None = None,
) -> Mapping:
    """The rows of a grouped matrix product: which token each holds, and where each choice lies.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `topk_idx` | `[num_tokens, num_topk]` | int64, contiguous | experts; -1: none |
    | `num_experts` | | int in `1..8192` | |
    | `num_expanded_tokens` | | int | rows `N`; 0: as many as needed (waits for the GPU) |
    | `alignment` | | int | each expert's rows start and end on a multiple of it |
    | `force_no_sync` | | bool | with 0 rows: never wait, return none |
    | `overflow` | `[1]` | int32 | receives how many choices found no row |
    | returns `pos_to_expert` | `[N]` | int32 | expert of a row, -1: padding |
    | returns `pos_to_token` | `[N]` | int32 | token of a row, -1: padding |
    | returns `pos_to_token_topk` | `[N]` | int32 | `token * num_topk + k` of a row, -1: padding |
    | returns `token_topk_to_pos` | `[num_tokens, num_topk]` | int32 | row of a choice, -1: none |
    | returns `expert_start` | `[num_experts]` | int32 | first row of an expert |
    | returns `expert_end` | `[num_experts]` | int32 | one past its rows, padding included |
    | returns `num_tokens_per_expert` | `[num_experts]` | int32 | `expert_end - expert_start` |
    | returns | | list of int | the same on the host, `[]` where nothing waited |

    Experts follow each other; the rows of one hold its tokens in ascending order, then padding. The
    result does not depend on the SM budget. Choices outside `0..num_experts-1` have no row.

    With `num_expanded_tokens > 0` nothing waits and CUDA graphs can record the call. If that is too
    few, rows beyond are dropped: their choices get -1, `expert_start` and `expert_end` stop at `N`,
    and `overflow` counts them; the checked mode raises. All tensors but `overflow` are views of one
    allocation. Up to 2^31 numbers in all (`3 N`, the choices, `3 num_experts`); `alignment` up to
    65536.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> chosen = torch.tensor([[0, 2], [2, -1], [0, 3], [2, 0]])
    >>> pos_to_expert, pos_to_token, *_ = get_fused_mapping(chosen, 4, 0, 4)
    >>> pos_to_token.tolist()
    [0, 2, 3, -1, 0, 1, 3, -1, 2, -1, -1, -1]
    """
    synchronise = num_expanded_tokens == 0 and not force_no_sync
    capacity = num_expanded_tokens
    if synchronise:
        capacity = most_expanded_tokens(topk_idx.numel(), num_experts, alignment)
    flat = _mapping(topk_idx, num_experts, capacity, alignment)
    if not torch.compiler.is_compiling() and backends.is_checked() and not flat.is_meta:
        dropped = int(flat[-1])
        if dropped and not synchronise:
            raise ValueError(
                f"num_expanded_tokens must be large enough, but {dropped} choices found no row in "
                f"{capacity}"
            )
    return finish_mapping(flat, topk_idx, num_experts, synchronise, overflow)
