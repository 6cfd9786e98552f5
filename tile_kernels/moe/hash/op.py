"""`hash_gate`: experts by token id, weights by the router."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe import gates
from tile_kernels.moe.hash import reference
from tile_kernels.moe.hash.plan import plan
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.weight.reference import topk_weights_backward
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, dtype_name, row_alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.moe.hash.kernel", "hash_gate", plan)

_FLOATS = (torch.float32, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)


class Arguments(NamedTuple):
    logits: Tensor
    token_ids: Tensor
    table: Tensor
    routed_scaling_factor: float
    scoring_func: str
    mask: Tensor | None
    num_shared_experts: int
    to_physical_map: Tensor | None
    logical_count: Tensor | None
    ep_rank: int
    num_ep_ranks: int
    tp_rank: int
    num_tp_ranks: int

    @property
    def num_topk(self) -> int:
        """Experts that the table gives a token."""
        return self.table.shape[1]

    @property
    def num_shared(self) -> int:
        """Slots of shared experts behind the chosen ones."""
        return self.num_shared_experts

    def check(self) -> None:
        dims = ("num_tokens", "num_experts")
        checks.tensor("logits", self.logits, dims, _FLOATS, unit_inner_stride=True)
        num_tokens, num_experts = self.logits.shape
        if num_experts < 1:
            raise ValueError("logits must have at least one expert, got 0")
        checks.tensor(
            "token_ids", self.token_ids, ("num_tokens",), _INTEGERS, shape=(num_tokens,),
            contiguous=True,
        )  # fmt: skip
        checks.tensor("table", self.table, ("vocabulary", "num_topk"), _INTEGERS, contiguous=True)
        if self.table.shape[0] < 1 or not 1 <= self.table.shape[1] <= MAX_SLOTS:
            raise ValueError(
                f"table must have at least one row and 1..{MAX_SLOTS} columns, got shape "
                f"{tuple(self.table.shape)}"
            )
        checks.number("routed_scaling_factor", self.routed_scaling_factor)
        gates.check_scoring(self.scoring_func)
        gates.check_mask(self.mask, num_tokens)
        checks.integer("num_shared_experts", self.num_shared_experts, 0, MAX_SLOTS)
        gates.check_numbering(self)

    def outputs(self) -> tuple[Out, Out]:
        return gates.gate_outputs(self)

    def launches(self, topk_idx: Spec, topk_weights: Spec) -> Launch | None:
        if self.logits.numel() == 0:
            return None
        problem = (
            self.logits.shape[1], self.num_topk, self.num_shared,
            int(ScoringFunc.from_str(self.scoring_func)), self.mask is not None,
            self.to_physical_map is not None, dtype_name(self.logits), dtype_name(self.token_ids),
            dtype_name(self.table), row_alignment(self.logits),
        )  # fmt: skip
        arguments = (
            self.logits, self.token_ids, self.table, gates.flat_mask(self), self.to_physical_map,
            self.logical_count, topk_idx, topk_weights, *gates.gate_numbers(self),
        )  # fmt: skip
        return Launch(_KERNEL, problem, arguments)

    def check_values(self) -> None:
        """Refuses ids outside the table unless -1 or masked, and entries that name no expert."""
        read = self.token_ids
        if self.mask is not None:
            read = torch.where(self.mask.view(-1), read, -1)
        checks.in_range("token_ids", read, -1, self.table.shape[0] - 1)
        checks.in_range("table", self.table, -1, self.logits.shape[1] - 1)
        gates.check_map_values(self)


def cost(
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
    bytes_per_token = (
        read * logits.element_size()
        + token_ids.element_size()
        + num_topk * table.element_size()
        + 12 * (num_topk + num_shared_experts)
        + (mask is not None)
    )
    return Cost(bytes=num_tokens * bytes_per_token)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a = Arguments(*inputs)
    ctx.factor, ctx.scoring_func = a.routed_scaling_factor, a.scoring_func
    ctx.save_for_backward(a.logits, a.token_ids, a.table, a.mask)
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _idx: Any, grad_weights: Tensor) -> tuple[Any, ...]:
    logits, token_ids, table, mask = ctx.saved_tensors
    chosen = reference.hashed_experts(token_ids, table, mask)
    grad = topk_weights_backward(
        grad_weights[:, : table.shape[1]], logits.float(), chosen, ctx.scoring_func, ctx.factor
    )
    return grad.to(logits.dtype), *(None,) * (len(Arguments._fields) - 1)


HASH_GATE = Operator(
    "moe.hash_gate",
    Arguments,
    reference=reference.hash_gate,
    cost=cost,
    dynamic={"logits": 1, "token_ids": 0, "mask": 0},
    backward=_backward,
    setup_context=_setup,
)


@HASH_GATE.public()
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
    """Looks up the experts of each token in a table by its id, and computes their weights.

    The experts of token `t` are `table[token_ids[t]]`, in that order; an expert may occur twice.
    Weights are `score / (1e-20 + sum of the chosen scores) * routed_scaling_factor`, summed in slot
    order in float32, and differentiable with respect to `logits`. There is no bias: nothing is
    ranked. Shared experts, replicas and ranks follow as in `top2_sum_gate`, steps 3 and 4.

    An entry of the table outside `0..num_experts-1` has index -1 and weight 0 and is not in the
    sum. A masked token and one whose id is outside the table have -1 and 0 in every slot.

    Args:
        logits: `[num_tokens, num_experts]`, float32 or bfloat16, `stride(1) == 1`.
        token_ids: `[num_tokens]`, int32 or int64, contiguous.
        table: `[vocabulary, num_topk]`, int32 or int64, contiguous, up to 32 columns: experts.
        routed_scaling_factor: Multiplies the normalized weights.
        scoring_func: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"` (`scoring.ScoringFunc`).
        mask: `num_tokens` elements, bool, or None. Where it is False the token does not route.
        num_shared_experts: Slots of weight 1 to append, in `0..32`; they need a map.
        to_physical_map: `[num_experts + shared, 1 + extra]`, int32, or None: the physical experts
            that are replicas of a logical one.
        logical_count: `[num_experts + shared]`, int32, or None: the replicas in use of an expert.
        ep_rank: This expert-parallel rank; this and the next three as in `top2_sum_gate`.
        num_ep_ranks: The number of expert-parallel ranks.
        tp_rank: This tensor-parallel rank.
        num_tp_ranks: The number of tensor-parallel ranks.

    Returns:
        `(topk_idx, topk_weights)`, both `[num_tokens, num_topk + shared]`, as `top2_sum_gate`
        returns them.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape, a layout or a number is out of range.

    Example:
        >>> table = torch.tensor([[0, 3], [2, 1]])
        >>> idx, weights = hash_gate(torch.zeros(2, 4), torch.tensor([1, 0]), table)
        >>> idx.tolist(), weights.tolist()
        ([[2, 1], [0, 3]], [[0.5, 0.5], [0.5, 0.5]])
    """
    return HASH_GATE(
        logits, token_ids, table, routed_scaling_factor, scoring_func, mask, num_shared_experts,
        to_physical_map, logical_count, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
    )  # fmt: skip
