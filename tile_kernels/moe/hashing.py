"""The hash gate: experts by token id, weights by the router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.hashing import HASH_GATE
from tile_kernels.moe.routing import (
    MOST_SLOTS,
    check_map_values,
    check_mask,
    check_placing,
    check_scoring,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, dtype_name, nonempty, row_alignment
from tile_kernels.runtime.op import gradient, op
from tile_kernels.torch.hashing import hashed_experts
from tile_kernels.torch.scoring import ScoringFunc

_KERNEL = Kernel("tile_kernels.moe.kernels.hashing", "hash_gate")
_INTEGERS = (torch.int32, torch.int64)


def _check(
    logits: Tensor,
    token_ids: Tensor,
    table: Tensor,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    num_shared_experts: int = 0,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    ep_rank: int = 0,
    num_ep_ranks: int = 1,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
) -> None:
    checks.tensor(
        "logits", logits, ("num_tokens", "num_experts"), (torch.float32, torch.bfloat16),
        unit_inner_stride=True,
    )  # fmt: skip
    num_tokens, num_experts = logits.shape
    if num_experts < 1:
        raise ValueError("logits must have at least one expert, got 0")
    checks.tensor(
        "token_ids", token_ids, ("num_tokens",), _INTEGERS, shape=(num_tokens,), contiguous=True
    )
    checks.tensor("table", table, ("vocabulary", "num_topk"), _INTEGERS, contiguous=True)
    if table.shape[0] < 1 or not 1 <= table.shape[1] <= MOST_SLOTS:
        raise ValueError(
            f"table must have at least one row and 1..{MOST_SLOTS} columns, got shape "
            f"{tuple(table.shape)}"
        )
    checks.number("routed_scaling_factor", routed_scaling_factor)
    check_scoring(scoring_func)
    check_mask(mask, num_tokens)
    checks.integer("num_shared_experts", num_shared_experts, 0, MOST_SLOTS)
    check_placing(
        num_experts, num_shared_experts, to_physical_map, logical_count,
        ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
    )  # fmt: skip


def _check_values(
    logits: Tensor,
    token_ids: Tensor,
    table: Tensor,
    routed_scaling_factor: float = 1.0,  # noqa: ARG001
    scoring_func: str = "",  # noqa: ARG001
    mask: Tensor | None = None,
    num_shared_experts: int = 0,  # noqa: ARG001
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    *_ranks: int,
    **_named_ranks: int,
) -> None:
    """Ids are in the table unless -1 or masked, its entries experts or -1."""
    read = token_ids if mask is None else torch.where(mask.view(-1), token_ids, -1)
    checks.in_range("token_ids", read, -1, table.shape[0] - 1)
    checks.in_range("table", table, -1, logits.shape[1] - 1)
    check_map_values(logits.shape[1], to_physical_map, logical_count)


def _cost(
    logits: Tensor,
    token_ids: Tensor,
    table: Tensor,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    num_shared_experts: int = 0,
    **_: Any,
) -> Cost:
    """Softmax reads every logit, the others those of the chosen experts."""
    num_tokens, num_topk = logits.shape[0], table.shape[1]
    read = logits.shape[1] if scoring_func.lower() == "softmax" else num_topk
    a_token = (
        read * logits.element_size()
        + token_ids.element_size()
        + num_topk * table.element_size()
        + 12 * (num_topk + num_shared_experts)
        + (mask is not None)
    )
    return Cost(bytes=num_tokens * a_token)


@op(
    check=_check,
    oracle=oracles.hash_gate,
    cost=_cost,
    cases=HASH_GATE,
    values=_check_values,
)
def hash_gate(
    logits: Tensor,
    token_ids: Tensor,
    table: Tensor,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    num_shared_experts: int = 0,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    ep_rank: int = 0,
    num_ep_ranks: int = 1,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """The experts of each token by its id, from a table; weights by the router's logits.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `logits` | `[num_tokens, num_experts]` | float32 or bfloat16 | `stride(1) == 1` |
    | `token_ids` | `[num_tokens]` | int32 or int64, contiguous | |
    | `table` | `[vocabulary, num_topk]`, up to 32 columns | int32 or int64, contiguous | experts |
    | `routed_scaling_factor` | | float | multiplies the normalised weights |
    | `scoring_func` | | str | `sigmoid`, `sqrtsoftplus`, `softmax` (`scoring.ScoringFunc`) |
    | `mask` | `num_tokens` elements | bool | False: the token does not route |
    | `num_shared_experts` | | int in `0..32` | slots of weight 1 to append; they need a map |
    | `to_physical_map` | `[num_experts + shared, 1 + extra]` | int32 | places of an expert |
    | `logical_count` | `[num_experts + shared]` | int32 | replicas in use of an expert |
    | `ep_rank`, `num_ep_ranks`, `tp_rank`, `num_tp_ranks` | | int | as in `top2_sum_gate` |
    | returns `topk_idx` | `[num_tokens, num_topk + shared]` | int64, contiguous | -1: not here |
    | returns `topk_weights` | `[num_tokens, num_topk + shared]` | float32, contiguous | |

    The experts of token `t` are `table[token_ids[t]]`, in that order; one may stand there twice.
    Weights are `score / (1e-20 + sum of the chosen scores) * routed_scaling_factor`, summed in slot
    order in float32, and differentiable with respect to `logits`. There is no bias: nothing is
    ranked. Shared experts, replicas and ranks follow as in `top2_sum_gate`, steps 3 and 4.

    An entry of the table outside `0..num_experts-1` has index -1 and weight 0 and is not in the
    sum. A masked token and one whose id is outside the table have -1 and 0 in every slot.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> table = torch.tensor([[0, 3], [2, 1]])
    >>> idx, weights = hash_gate(torch.zeros(2, 4), torch.tensor([1, 0]), table)
    >>> idx.tolist(), weights.tolist()
    ([[2, 1], [0, 3]], [[0.5, 0.5], [0.5, 0.5]])
    """
    num_tokens, num_experts = logits.shape
    num_topk = table.shape[1]
    slots = num_topk + num_shared_experts
    topk_idx = logits.new_empty((num_tokens, slots), dtype=torch.int64)
    topk_weights = logits.new_empty((num_tokens, slots), dtype=torch.float32)
    if nonempty(logits):
        extra = 0 if to_physical_map is None else to_physical_map.shape[1] - 1
        problem = (
            num_experts, num_topk, num_shared_experts, int(ScoringFunc.from_str(scoring_func)),
            mask is not None, to_physical_map is not None,
            dtype_name(logits), dtype_name(token_ids), dtype_name(table),
            row_alignment(logits),
        )  # fmt: skip
        _KERNEL.launch(
            problem, logits, token_ids, table, None if mask is None else mask.view(-1),
            to_physical_map, logical_count, topk_idx, topk_weights,
            float(routed_scaling_factor), ep_rank, (num_experts + extra) // num_ep_ranks, tp_rank,
            num_tp_ranks,
        )  # fmt: skip
    return topk_idx, topk_weights


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, token_ids, table, ctx.factor, ctx.scoring_func, mask, *_ = inputs
    ctx.save_for_backward(logits, token_ids, table, mask)
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _idx: Any, grad_weights: Tensor) -> tuple[Any, ...]:
    logits, token_ids, table, mask = ctx.saved_tensors
    chosen = hashed_experts(token_ids, table, mask)
    grad = oracles.topk_weights_backward(
        grad_weights[:, : table.shape[1]], logits.float(), chosen, ctx.scoring_func, ctx.factor
    )
    return grad.to(logits.dtype), *(None,) * 12


gradient(hash_gate, _backward, setup_context=_save)
