"""`top2_sum_gate`: experts by their scores, weights that can be trained."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe import gates
from tile_kernels.moe.arguments import check_scores
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.top2_sum import reference
from tile_kernels.moe.top2_sum.plan import MAX_EXPERTS, plan
from tile_kernels.moe.weight.reference import topk_weights_backward
from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import refuse_tangents
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.moe.top2_sum.kernel", "top2_sum_gate", plan)


class Arguments(NamedTuple):
    logits: Tensor
    bias: Tensor
    num_topk: int
    num_topk_groups: int
    num_groups: int
    use_shared_as_routed: bool
    num_shared_experts: int
    routed_scaling_factor: float
    ep_rank: int
    num_ep_ranks: int
    tp_rank: int
    num_tp_ranks: int
    scoring_func: str
    mask: Tensor | None
    fix_routing_mask: Tensor | None
    to_physical_map: Tensor | None
    logical_count: Tensor | None
    unmapped_topk_idx: Tensor | None

    @property
    def num_shared(self) -> int:
        """Slots of shared experts behind the chosen ones."""
        return self.num_shared_experts if self.use_shared_as_routed else 0

    def check(self) -> None:
        check_scores("logits", self.logits, MAX_EXPERTS)
        num_tokens, num_experts = self.logits.shape
        checks.tensor(
            "bias", self.bias, ("num_experts",), torch.float32, shape=(num_experts,),
            contiguous=True,
        )  # fmt: skip
        limit = min(num_experts, MAX_SLOTS)
        checks.integer("num_topk", self.num_topk, 1, limit, because="(experts, and at most 32)")
        gates.check_groups(num_experts, self.num_topk, self.num_topk_groups, self.num_groups)
        checks.boolean("use_shared_as_routed", self.use_shared_as_routed)
        if self.use_shared_as_routed:
            checks.integer("num_shared_experts", self.num_shared_experts, 1, MAX_SLOTS)
        else:
            checks.integer("num_shared_experts", self.num_shared_experts, 0)
        checks.number("routed_scaling_factor", self.routed_scaling_factor)
        gates.check_scoring(self.scoring_func)
        gates.check_numbering(self)
        gates.check_mask(self.mask, num_tokens)
        if self.fix_routing_mask is not None:
            checks.tensor(
                "fix_routing_mask", self.fix_routing_mask, ("num_tokens",), torch.bool,
                shape=(num_tokens,), contiguous=True,
            )  # fmt: skip
            if self.unmapped_topk_idx is None:
                raise ValueError("fix_routing_mask needs unmapped_topk_idx, got None")
        if self.unmapped_topk_idx is not None:
            checks.tensor(
                "unmapped_topk_idx", self.unmapped_topk_idx, ("num_tokens", "num_topk"),
                torch.int64, shape=(num_tokens, self.num_topk), unit_inner_stride=True,
            )  # fmt: skip

    def outputs(self) -> tuple[Out, Out]:
        return gates.gate_outputs(self)

    def launches(self, topk_idx: Spec, topk_weights: Spec) -> Launch | None:
        if self.logits.numel() == 0:
            return None
        return _launch(self, self.unmapped_topk_idx, topk_idx, topk_weights)

    def check_values(self) -> None:
        """Refuses fixed choices that are no experts, and counts of replicas that exceed the map."""
        if self.fix_routing_mask is not None and self.unmapped_topk_idx is not None:
            read = self.fix_routing_mask
            if self.mask is not None:
                read = read & self.mask.view(-1)
            chosen = torch.where(read[:, None], self.unmapped_topk_idx, 0)
            checks.in_range("unmapped_topk_idx", chosen, 0, self.logits.shape[1] - 1)
        gates.check_map_values(self)


def outputs_with_choice(a: Arguments) -> tuple[Out, Out, Out]:
    choice = Out("choice", (a.logits.shape[0], a.num_topk), torch.int64)
    return *gates.gate_outputs(a), choice


def _launch(a: Arguments, choice: Any, topk_idx: Spec, topk_weights: Spec) -> Launch:
    """`choice` holds the choice of fixed tokens and receives that of all, or is None."""
    grouped = a.num_groups != a.num_topk_groups
    groups = (a.num_groups, a.num_topk_groups) if grouped else (0, 0)
    problem = (
        a.logits.shape[1], a.num_topk, *groups, a.num_shared,
        int(ScoringFunc.from_str(a.scoring_func)),
        a.mask is not None, a.fix_routing_mask is not None, a.to_physical_map is not None,
        choice is not None, alignment(a.logits, a.bias),
    )  # fmt: skip
    arguments = (
        a.logits, a.bias, gates.flat_mask(a), a.fix_routing_mask, a.to_physical_map,
        a.logical_count, choice, topk_idx, topk_weights, *gates.gate_numbers(a),
    )  # fmt: skip
    return Launch(_KERNEL, problem, arguments)


def launches_with_choice(
    a: Arguments, topk_idx: Spec, topk_weights: Spec, choice: Spec
) -> list[Launch | Host]:
    if a.logits.numel() == 0:
        return []
    launch = _launch(a, choice, topk_idx, topk_weights)
    if a.unmapped_topk_idx is None:
        return [launch]
    return [Host(Tensor.copy_, (choice, a.unmapped_topk_idx)), launch]


def cost(**arguments: Any) -> Cost:
    logits, num_topk = arguments["logits"], arguments["num_topk"]
    num_tokens = logits.shape[0]
    shared = arguments["num_shared_experts"] if arguments["use_shared_as_routed"] else 0
    total = 4 * logits.numel() + 4 * logits.shape[1] + 12 * num_tokens * (num_topk + shared)
    for name in ("mask", "fix_routing_mask", "unmapped_topk_idx"):
        given = arguments.get(name)
        total += 0 if given is None else given.numel() * given.element_size()
    return Cost(bytes=total)


def _reference_with_choice(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = Arguments(*args)
    if a.unmapped_topk_idx is None:
        choice = a.logits.new_empty((a.logits.shape[0], a.num_topk), dtype=torch.int64)
    else:
        choice = a.unmapped_topk_idx.clone(memory_format=torch.contiguous_format)
    return *reference.top2_sum_gate(*a._replace(unmapped_topk_idx=choice)), choice


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    ctx.factor, ctx.scoring_func = a.routed_scaling_factor, a.scoring_func
    ctx.save_for_backward(a.logits, output[2])
    ctx.mark_non_differentiable(output[0], output[2])


def _backward(ctx: Any, _idx: Any, grad_weights: Tensor, _choice: Any) -> tuple[Any, ...]:
    logits, choice = ctx.saved_tensors  # masked tokens have no choice, so no gradient
    grad = topk_weights_backward(
        grad_weights[:, : choice.shape[1]], logits, choice, ctx.scoring_func, ctx.factor
    )
    return grad, *(None,) * (len(Arguments._fields) - 1)


# Three operators behind the public function, as PyTorch's dispatcher needs them: nothing is
# written in place; the choice is, and must be given; the choice is a result, which the gradient
# needs.

_DYNAMIC = {"logits": 1, "mask": 0, "fix_routing_mask": 0, "unmapped_topk_idx": 1}

TOP2_SUM_GATE = Operator(
    "moe.top2_sum_gate",
    Arguments,
    reference=reference.top2_sum_gate,
    cost=cost,
    dynamic=_DYNAMIC,
    differentiable=False,
)

IN_PLACE = Operator(
    "moe._top2_sum_gate_in_place",
    Arguments,
    reference=reference.top2_sum_gate,
    dynamic=_DYNAMIC,
    mutates=("unmapped_topk_idx",),
    differentiable=False,
    serves="top2_sum_gate",
)

WITH_CHOICE = Operator(
    "moe._top2_sum_gate_with_choice",
    Arguments,
    outputs=outputs_with_choice,
    launches=launches_with_choice,
    reference=_reference_with_choice,
    dynamic=_DYNAMIC,
    backward=_backward,
    setup_context=_setup,
    serves="top2_sum_gate",
)


@TOP2_SUM_GATE.public(mutates=("unmapped_topk_idx",))
def top2_sum_gate(
    logits: Tensor,
    bias: Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the experts of each token and their weights: scores, groups, weights, ranks.

    1. Experts rank by score + bias (softmax: by logit + bias). With groups, only the experts of the
       best groups stay, by the sum of each group's two largest. Best first, ties to the smaller
       index; `unmapped_topk_idx`, if given, receives this choice.
    2. Weights are `score / (1e-20 + sum of the chosen scores) * routed_scaling_factor`, summed in
       slot order. They are differentiable with respect to `logits`.
    3. With a map, token `t` takes replica `(ep_rank + 23333 t) mod logical_count` of its expert.
    4. An expert of another tensor-parallel rank becomes -1, the others count among those of
       `tp_rank`, as in `mask_indices_by_tp` with `num_experts + extra` experts. Weights stay.

    A masked token has -1 and weight 0 everywhere. NaN ranks above `+inf` and is chosen: such a row
    has distinct valid experts and NaN weights. Infinite logits follow the formulas. A fixed choice
    outside `0..num_experts-1`, an expert without replicas, or a replica beyond the map gives -1;
    the first also weight 0, outside the sum.

    Args:
        logits: `[num_tokens, num_experts]`, float32, contiguous; up to 16384 experts.
        bias: `[num_experts]`, float32, contiguous; added for ranking only.
        num_topk: Experts per token, in `1..32`.
        num_topk_groups: Groups of experts that stay, up to 32.
        num_groups: All groups, up to 64. If both numbers are equal (or 0), there are no groups.
        use_shared_as_routed: Append `num_shared_experts` slots of weight 1. They need a map.
        num_shared_experts: The number of shared experts, up to 32 where they are appended.
        routed_scaling_factor: Multiplies the normalized weights.
        ep_rank: This expert-parallel rank. The ranks 0, 1, 0, 1 leave the experts as they are.
        num_ep_ranks: The number of expert-parallel ranks.
        tp_rank: This tensor-parallel rank.
        num_tp_ranks: The number of tensor-parallel ranks.
        scoring_func: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"` (`scoring.ScoringFunc`).
        mask: `num_tokens` elements, bool, or None. Where it is False the token does not route.
        fix_routing_mask: `[num_tokens]`, bool, or None. Where it is True the token takes the choice
            in `unmapped_topk_idx`.
        to_physical_map: `[num_experts + shared, 1 + extra]`, int32, or None: the physical experts
            that are replicas of a logical one.
        logical_count: `[num_experts + shared]`, int32, or None: the replicas in use of an expert.
        unmapped_topk_idx: `[num_tokens, num_topk]`, int64, `stride(1) == 1`, or None; read for
            fixed tokens, written for all.

    Returns:
        `(topk_idx, topk_weights)`: both `[num_tokens, num_topk + shared]` and contiguous; int64
        with -1 for an expert that is not on this rank, and float32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape, a layout or a number is out of range.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -2.0, 3.0]])
        >>> idx, weights = top2_sum_gate(
        ...     logits, torch.zeros(8), 2, 0, 0, False, 0, 1.0, 0, 1, 0, 1, "sigmoid"
        ... )
        >>> idx.tolist()
        [[7, 2]]
    """
    arguments: list[Any] = [
        logits, bias, num_topk, num_topk_groups, num_groups, use_shared_as_routed,
        num_shared_experts, routed_scaling_factor, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
        scoring_func, mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx,
    ]  # fmt: skip
    trained = isinstance(logits, Tensor) and logits.requires_grad and torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        if trained:
            TOP2_SUM_GATE.require(checks.writable, "unmapped_topk_idx", unmapped_topk_idx)
        else:
            refuse_tangents("top2_sum_gate", (logits,))
    if not trained:
        return (TOP2_SUM_GATE if unmapped_topk_idx is None else IN_PLACE)(*arguments)
    topk_idx, topk_weights, choice = WITH_CHOICE(*arguments)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(choice)
    return topk_idx, topk_weights
