"""Scored gates: experts by their scores, weights that can be trained."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.routing import TOP2_SUM_GATE, TOPK_WEIGHTS
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import face, gradient, op, refuse_tangents
from tile_kernels.torch.scoring import ScoringFunc

MOST_EXPERTS = 16384  # 512 for each warp of a block
MOST_GROUPS = 64  # two per lane of a warp
MOST_SLOTS = 32  # one per lane

_GATE = Kernel("tile_kernels.moe.kernels.routing", "top2_sum_gate")
_WEIGHTS = Kernel("tile_kernels.moe.kernels.routing", "topk_weights")


def check_scoring(scoring_func: str) -> None:
    """A name of `ScoringFunc` that scores."""
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
    """Groups of experts, of which the best are chosen first; as many as there are means none."""
    checks.integer("num_groups", num_groups, 0)
    checks.integer("num_topk_groups", num_topk_groups, 0, num_groups, because="(the groups)")
    if num_groups == num_topk_groups:
        return  # not grouped
    if num_groups > MOST_GROUPS or num_topk_groups > MOST_SLOTS:
        limits = f"{MOST_SLOTS} of {MOST_GROUPS}"
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
        raise ValueError(f"num_topk must be at most what {kept} have, got {num_topk}")


def _check_map(
    num_logical: int, num_shared: int, to_physical_map: Tensor | None, logical_count: Tensor | None
) -> int:
    """The number of extra physical experts."""
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


def check_placing(
    num_experts: int,
    num_shared: int,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
) -> None:
    """What says where experts lie: the map to physical ones, and ranks."""
    checks.integer("ep_rank", ep_rank, 0, 2**31 - 1)
    checks.integer("num_ep_ranks", num_ep_ranks, 1)
    checks.integer("tp_rank", tp_rank, -(2**31), 2**31 - 1)
    checks.integer("num_tp_ranks", num_tp_ranks, 1, 2**31 - 1)
    extra = _check_map(num_experts + num_shared, num_shared, to_physical_map, logical_count)
    if num_experts + extra < num_ep_ranks:
        experts = num_experts + extra
        raise ValueError(f"num_ep_ranks must be at most the {experts} experts, got {num_ep_ranks}")


def check_mask(mask: Tensor | None, num_tokens: int) -> None:
    """One bool for each token, in any shape."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
    checks.tensor("mask", mask, ("num_tokens",) * max(mask.dim(), 1), torch.bool)
    if mask.numel() != num_tokens or not mask.is_contiguous():
        raise ValueError(
            f"mask must have {num_tokens} elements, contiguous, got shape {tuple(mask.shape)}"
        )


def _check_gate(*arguments: Any) -> None:
    """In the order of `_launch`."""
    (
        logits, bias, num_topk, num_topk_groups, num_groups, use_shared_as_routed,
        num_shared_experts, routed_scaling_factor, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
        scoring_func, mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx,
    ) = arguments  # fmt: skip
    checks.tensor("logits", logits, ("num_tokens", "num_experts"), torch.float32, contiguous=True)
    num_tokens, num_experts = logits.shape
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"logits must have 1..{MOST_EXPERTS} experts, got {num_experts}")
    checks.tensor(
        "bias", bias, ("num_experts",), torch.float32, shape=(num_experts,), contiguous=True
    )
    most = min(num_experts, MOST_SLOTS)
    checks.integer("num_topk", num_topk, 1, most, because="(experts, and at most 32)")
    check_groups(num_experts, num_topk, num_topk_groups, num_groups)
    checks.boolean("use_shared_as_routed", use_shared_as_routed)
    num_shared = 0
    if use_shared_as_routed:
        checks.integer("num_shared_experts", num_shared_experts, 1, MOST_SLOTS)
        num_shared = num_shared_experts
    else:
        checks.integer("num_shared_experts", num_shared_experts, 0)
    checks.number("routed_scaling_factor", routed_scaling_factor)
    check_scoring(scoring_func)
    check_placing(
        num_experts, num_shared, to_physical_map, logical_count,
        ep_rank, num_ep_ranks, tp_rank, num_tp_ranks,
    )  # fmt: skip
    check_mask(mask, num_tokens)
    if fix_routing_mask is not None:
        checks.tensor(
            "fix_routing_mask", fix_routing_mask, ("num_tokens",), torch.bool,
            shape=(num_tokens,), contiguous=True,
        )  # fmt: skip
        if unmapped_topk_idx is None:
            raise ValueError("fix_routing_mask needs unmapped_topk_idx, which holds the choice")
    if unmapped_topk_idx is not None:
        checks.tensor(
            "unmapped_topk_idx", unmapped_topk_idx, ("num_tokens", "num_topk"), torch.int64,
            shape=(num_tokens, num_topk), unit_inner_stride=True,
        )  # fmt: skip


def _check_gate_values(logits: Tensor, *rest: Any) -> None:
    """Fixed choices are experts, counts of replicas fit the map, places are -1 or more."""
    mask, fixed, physical, count, unmapped = rest[-5:]
    if fixed is not None:
        read = fixed if mask is None else fixed & mask.view(-1)
        chosen = torch.where(read[:, None], unmapped, 0)
        checks.in_range("unmapped_topk_idx", chosen, 0, logits.shape[1] - 1)
    check_map_values(logits.shape[1], physical, count)


def check_map_values(
    num_experts: int, to_physical_map: Tensor | None, logical_count: Tensor | None
) -> None:
    """Counts of replicas fit the map, and the places of replicas in use exist."""
    if to_physical_map is None or logical_count is None:
        return
    columns = to_physical_map.shape[1]
    checks.in_range("logical_count", logical_count, 1, columns)
    used = torch.arange(columns, device=to_physical_map.device) < logical_count[:, None]
    places = torch.where(used, to_physical_map, -1)
    checks.in_range("to_physical_map", places, -1, num_experts + columns - 2)


def _launch(
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
    mask: Tensor | None,
    fix_routing_mask: Tensor | None,
    to_physical_map: Tensor | None,
    logical_count: Tensor | None,
    unmapped_topk_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    num_shared = num_shared_experts if use_shared_as_routed else 0
    slots = num_topk + num_shared
    topk_idx = logits.new_empty((num_tokens, slots), dtype=torch.int64)
    topk_weights = logits.new_empty((num_tokens, slots))
    if not nonempty(logits):
        return topk_idx, topk_weights
    if num_groups == num_topk_groups:
        num_groups = num_topk_groups = 0
    extra = 0 if to_physical_map is None else to_physical_map.shape[1] - 1
    problem = (
        num_experts, num_topk, num_groups, num_topk_groups, num_shared,
        int(ScoringFunc.from_str(scoring_func)), mask is not None, fix_routing_mask is not None,
        to_physical_map is not None, unmapped_topk_idx is not None,
        min(alignment(logits), alignment(bias)),
    )  # fmt: skip
    _GATE.launch(
        problem, logits, bias, None if mask is None else mask.view(-1), fix_routing_mask,
        to_physical_map, logical_count, unmapped_topk_idx, topk_idx, topk_weights,
        float(routed_scaling_factor), ep_rank, (num_experts + extra) // num_ep_ranks, tp_rank,
        num_tp_ranks,
    )  # fmt: skip
    return topk_idx, topk_weights


def _cost_gate(**arguments: Any) -> Cost:
    logits, num_topk = arguments["logits"], arguments["num_topk"]
    num_tokens = logits.shape[0]
    shared = arguments["num_shared_experts"] if arguments["use_shared_as_routed"] else 0
    total = 4 * logits.numel() + 4 * logits.shape[1] + 12 * num_tokens * (num_topk + shared)
    for name in ("mask", "fix_routing_mask", "unmapped_topk_idx"):
        given = arguments.get(name)
        total += 0 if given is None else given.numel() * given.element_size()
    return Cost(bytes=total)


# Three operators behind the public function, as PyTorch wants them: nothing is written in place;
# the choice is, and must be given; the choice is a result, which the gradient needs.

_SIGNATURE = inspect.signature(_launch, eval_str=True)
*_OTHERS, _UNMAPPED = _SIGNATURE.parameters.values()

_gate = op(
    check=_check_gate,
    oracle=oracles.top2_sum_gate,
    cost=_cost_gate,
    cases=TOP2_SUM_GATE,
    values=_check_gate_values,
    differentiable=False,
    name="top2_sum_gate",
)(_launch)

_gate_in_place = op(
    check=_check_gate,
    oracle=oracles.top2_sum_gate,
    mutates=("unmapped_topk_idx",),
    differentiable=False,
    values=_check_gate_values,
    name="_gate_in_place",
    serves="top2_sum_gate",
    signature=_SIGNATURE.replace(parameters=[*_OTHERS, _UNMAPPED.replace(annotation=Tensor)]),
)(_launch)


def _choice(unmapped_topk_idx: Tensor | None, logits: Tensor, num_topk: int) -> Tensor:
    """A buffer for the logical choice, with that of fixed tokens in it."""
    if unmapped_topk_idx is None:
        return logits.new_empty((logits.shape[0], num_topk), dtype=torch.int64)
    return unmapped_topk_idx.clone(memory_format=torch.contiguous_format)


def _oracle_with_choice(
    logits: Tensor, bias: Tensor, num_topk: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    choice = _choice(rest[-1], logits, num_topk)
    arguments: list[Any] = [logits, bias, num_topk, *rest[:-1], choice]
    return *oracles.top2_sum_gate(*arguments), choice


@op(
    check=_check_gate,
    oracle=_oracle_with_choice,
    values=_check_gate_values,
    serves="top2_sum_gate",
    signature=_SIGNATURE.replace(return_annotation=tuple[Tensor, Tensor, Tensor]),
)
def _gate_with_choice(
    logits: Tensor, bias: Tensor, num_topk: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    choice = _choice(rest[-1], logits, num_topk)
    arguments: list[Any] = [logits, bias, num_topk, *rest[:-1], choice]
    return *_launch(*arguments), choice


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.factor, ctx.scoring_func = inputs[7], inputs[12]
    ctx.save_for_backward(inputs[0], output[2])
    ctx.mark_non_differentiable(output[0], output[2])


def _gate_backward(ctx: Any, _idx: Any, grad_weights: Tensor, _choice: Any) -> tuple[Any, ...]:
    logits, choice = ctx.saved_tensors  # masked tokens have no choice, so no gradient
    grad = oracles.topk_weights_backward(
        grad_weights[:, : choice.shape[1]], logits, choice, ctx.scoring_func, ctx.factor
    )
    return grad, *(None,) * 17


gradient(_gate_with_choice, _gate_backward, setup_context=_save_gate)


@face(_gate, oracle=oracles.top2_sum_gate, mutates=("unmapped_topk_idx",))
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
    """The experts of each token and their weights: score, choose by group, normalise, map to ranks.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `logits` | `[num_tokens, num_experts]` | float32, contiguous | up to 16384 experts |
    | `bias` | `[num_experts]` | float32, contiguous | added for ranking only |
    | `num_topk` | | int in `1..32` | experts per token |
    | `num_topk_groups`, `num_groups` | | int, up to 32 of 64 | equal (or 0, 0): no groups |
    | `use_shared_as_routed` | | bool | append `num_shared_experts` slots of weight 1 |
    | `routed_scaling_factor` | | float | multiplies the normalised weights |
    | `ep_rank`, `num_ep_ranks`, `tp_rank`, `num_tp_ranks` | | int | see below; 0, 1, 0, 1: as is |
    | `scoring_func` | | str | `sigmoid`, `sqrtsoftplus`, `softmax` (`scoring.ScoringFunc`) |
    | `mask` | `num_tokens` elements | bool | False: the token does not route |
    | `fix_routing_mask` | `[num_tokens]` | bool | True: take the choice in `unmapped_topk_idx` |
    | `to_physical_map` | `[num_experts + shared, 1 + extra]` | int32 | places of an expert |
    | `logical_count` | `[num_experts + shared]` | int32 | replicas in use of an expert |
    | `unmapped_topk_idx` | `[num_tokens, num_topk]` | int64, `stride(1) == 1` | in and out |
    | returns `topk_idx` | `[num_tokens, num_topk + shared]` | int64, contiguous | -1: not here |
    | returns `topk_weights` | `[num_tokens, num_topk + shared]` | float32, contiguous | |

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

    Raises `TypeError` or `ValueError` with the argument's name.

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
    if not (isinstance(logits, Tensor) and logits.requires_grad and torch.is_grad_enabled()):
        if not torch.compiler.is_compiling():
            refuse_tangents("top2_sum_gate", (logits,))
        return (_gate if unmapped_topk_idx is None else _gate_in_place)(*arguments)
    topk_idx, topk_weights, choice = _gate_with_choice(*arguments)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(choice)
    return topk_idx, topk_weights


# ---- weights of a given choice ------------------------------------------------------------------


def _check_weights(
    logits: Tensor,
    topk_idx: Tensor,
    scoring_func: str = "sigmoid",
    routed_scaling_factor: float = 1.0,
) -> None:
    checks.tensor("logits", logits, ("num_tokens", "num_experts"), torch.float32, contiguous=True)
    if logits.shape[1] < 1:
        raise ValueError("logits must have at least one expert, got 0")
    checks.tensor(
        "topk_idx", topk_idx, ("num_tokens", "num_topk"), torch.int64,
        shape=(logits.shape[0], None), contiguous=True,
    )  # fmt: skip
    if not 1 <= topk_idx.shape[1] <= MOST_SLOTS:
        raise ValueError(f"topk_idx must have 1..{MOST_SLOTS} columns, got {topk_idx.shape[1]}")
    check_scoring(scoring_func)
    checks.number("routed_scaling_factor", routed_scaling_factor)


def _cost_weights(logits: Tensor, topk_idx: Tensor, scoring_func: str = "", **_: Any) -> Cost:
    """Softmax reads every logit, the others those of the chosen experts."""
    read = logits.numel() if scoring_func.lower() == "softmax" else topk_idx.numel()
    return Cost(bytes=4 * read + 12 * topk_idx.numel())


@op(
    check=_check_weights,
    oracle=oracles.topk_weights,
    cost=_cost_weights,
    cases=TOPK_WEIGHTS,
    values=lambda logits, topk_idx, *_, **__: checks.in_range(
        "topk_idx", topk_idx, -1, logits.shape[1] - 1
    ),
)
def topk_weights(
    logits: Tensor,
    topk_idx: Tensor,
    scoring_func: str = "sigmoid",
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """The weights of experts that were chosen elsewhere, differentiable with respect to the logits.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `logits` | `[num_tokens, num_experts]` | float32 | contiguous |
    | `topk_idx` | `[num_tokens, num_topk]`, up to 32 | int64 | contiguous |
    | `scoring_func` | | `sigmoid`, `sqrtsoftplus`, `softmax` | |
    | `routed_scaling_factor` | | float | |
    | returns | `[num_tokens, num_topk]` | float32 | contiguous |

    `score / (1e-20 + sum of the chosen scores) * routed_scaling_factor`, summed in slot order: step
    2 of `top2_sum_gate`. With `topk_gate` it is the plain top-k router. Entries of `topk_idx`
    outside `0..num_experts-1` get weight 0 and are not in the sum; repeated experts count twice.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> topk_weights(torch.zeros(1, 4), torch.tensor([[2, -1, 0]])).tolist()
    [[0.5, 0.0, 0.5]]
    """
    weights = logits.new_empty(topk_idx.shape)
    if nonempty(topk_idx):
        scoring = int(ScoringFunc.from_str(scoring_func))
        problem = (logits.shape[1], topk_idx.shape[1], scoring, alignment(logits))
        _WEIGHTS.launch(problem, logits, topk_idx, weights, float(routed_scaling_factor))
    return weights


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.scoring_func, ctx.factor = inputs[2], inputs[3]


def _weights_backward(ctx: Any, grad_weights: Tensor) -> tuple[Any, ...]:
    logits, topk_idx = ctx.saved_tensors
    grad = oracles.topk_weights_backward(
        grad_weights, logits, topk_idx, ctx.scoring_func, ctx.factor
    )
    return grad, None, None, None


gradient(topk_weights, _weights_backward, setup_context=_save_weights)
