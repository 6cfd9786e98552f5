"""`moe_topk_gate_forward` and `moe_topk_gate_backward`: the gate with a bias for image tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe import gates
from tile_kernels.moe.arguments import check_scores
from tile_kernels.moe.moe_topk import reference
from tile_kernels.moe.moe_topk.plan import plan, plan_backward
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.top2_sum.plan import MAX_EXPERTS
from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import refuse_tangents
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.moe.moe_topk.kernel", "moe_topk_gate", plan)
_BACKWARD = Kernel("tile_kernels.moe.moe_topk.kernel", "moe_topk_gate_backward", plan_backward)


# ---- forward ------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    logits: Tensor
    num_topk: int
    use_shared_as_routed: bool
    num_shared_experts: int
    routed_scaling_factor: float
    ep_rank: int
    scoring_func: str
    mask: Tensor | None
    bias: Tensor | None
    image_bias: Tensor | None
    image_token_mask: Tensor | None
    fix_routing_mask: Tensor | None
    to_physical_map: Tensor | None
    logical_count: Tensor | None
    unmapped_topk_idx: Tensor | None
    force_random: Tensor | None
    scores: Tensor | None
    out_dtype: torch.dtype

    @property
    def num_shared(self) -> int:
        """Slots of shared experts behind the chosen ones."""
        return self.num_shared_experts if self.use_shared_as_routed else 0

    def check(self) -> None:
        check_scores("logits", self.logits, MAX_EXPERTS)
        num_tokens, num_experts = self.logits.shape
        limit = min(num_experts, MAX_SLOTS)
        checks.integer("num_topk", self.num_topk, 1, limit, because="(experts, and at most 32)")
        checks.boolean("use_shared_as_routed", self.use_shared_as_routed)
        if self.use_shared_as_routed:
            checks.integer(
                "num_shared_experts", self.num_shared_experts, 1, MAX_SLOTS - self.num_topk,
                because="(slots without num_topk)",
            )  # fmt: skip
        else:
            checks.integer("num_shared_experts", self.num_shared_experts, 0)
        checks.number("routed_scaling_factor", self.routed_scaling_factor)
        checks.integer("ep_rank", self.ep_rank, 0, 2**31 - 1)
        gates.check_scoring(self.scoring_func)
        gates.check_mask(self.mask, num_tokens)
        if (self.image_bias is None) != (self.image_token_mask is None):
            raise ValueError("image_bias and image_token_mask must be given together")
        for name in ("bias", "image_bias"):
            if getattr(self, name) is not None:
                checks.tensor(
                    name, getattr(self, name), ("num_experts",), torch.float32,
                    shape=(num_experts,), contiguous=True,
                )  # fmt: skip
        for name in ("image_token_mask", "fix_routing_mask", "force_random"):
            if getattr(self, name) is not None:
                checks.tensor(
                    name, getattr(self, name), ("num_tokens",), torch.bool, shape=(num_tokens,),
                    contiguous=True,
                )  # fmt: skip
        checks.one_of("out_dtype", self.out_dtype, checks.INTEGERS)
        self._check_map(num_experts + self.num_shared)
        if self.fix_routing_mask is not None and self.unmapped_topk_idx is None:
            raise ValueError("fix_routing_mask needs unmapped_topk_idx, got None")
        if self.unmapped_topk_idx is not None:
            checks.tensor(
                "unmapped_topk_idx", self.unmapped_topk_idx, ("num_tokens", "num_topk"),
                self.out_dtype, shape=(num_tokens, self.num_topk), unit_inner_stride=True,
            )  # fmt: skip
        if self.scores is not None:
            checks.tensor(
                "scores", self.scores, ("num_tokens", "num_experts"), torch.float32,
                shape=(num_tokens, num_experts), contiguous=True,
            )  # fmt: skip

    def _check_map(self, num_logical: int) -> None:
        if (self.to_physical_map is None) != (self.logical_count is None):
            raise ValueError("to_physical_map and logical_count must be given together")
        if self.to_physical_map is not None:
            checks.tensor(
                "to_physical_map", self.to_physical_map, ("num_logical", "columns"), torch.int32,
                shape=(num_logical, None), contiguous=True,
            )  # fmt: skip
            checks.tensor(
                "logical_count", self.logical_count, ("num_logical",), torch.int32,
                shape=(num_logical,), contiguous=True,
            )  # fmt: skip

    def outputs(self) -> tuple[Out, Out]:
        shape = (self.logits.shape[0], self.num_topk + self.num_shared)
        return Out("out", shape, self.out_dtype), Out("out_weights", shape, torch.float32)

    def launches(self, topk_idx: Spec, topk_weights: Spec) -> Launch | None:
        if self.logits.numel() == 0:
            return None
        return _launch(self, self.unmapped_topk_idx, self.scores, topk_idx, topk_weights)

    def check_values(self) -> None:
        """Refuses fixed choices that are no experts, and counts of replicas that exceed the map."""
        if self.fix_routing_mask is not None and self.unmapped_topk_idx is not None:
            read = self.fix_routing_mask
            if self.mask is not None:
                read = read & self.mask.view(-1)
            if self.force_random is not None:
                read = read & ~self.force_random
            chosen = torch.where(read[:, None], self.unmapped_topk_idx, -1)
            checks.in_range("unmapped_topk_idx", chosen, -1, self.logits.shape[1] - 1)
        if self.to_physical_map is not None:
            checks.in_range("logical_count", self.logical_count, 1, self.to_physical_map.shape[1])


def _launch(a: Arguments, choice: Any, scores: Any, topk_idx: Spec, topk_weights: Spec) -> Launch:
    """`choice` holds the choice of fixed tokens and receives that of all, or is None."""
    rows = [x for x in (a.logits, a.bias, a.image_bias, scores) if x is not None]
    problem = (
        a.logits.shape[1], a.num_topk, a.num_shared, int(ScoringFunc.from_str(a.scoring_func)),
        a.mask is not None, a.fix_routing_mask is not None, a.to_physical_map is not None,
        choice is not None, a.bias is not None, a.image_bias is not None,
        a.force_random is not None, scores is not None, dtype_name(topk_idx), alignment(*rows),
    )  # fmt: skip
    arguments = (
        a.logits, gates.flat_mask(a), a.bias, a.image_bias, a.image_token_mask, a.fix_routing_mask,
        a.to_physical_map, a.logical_count, choice, a.force_random, scores, topk_idx, topk_weights,
        float(a.routed_scaling_factor), a.ep_rank,
    )  # fmt: skip
    return Launch(_KERNEL, problem, arguments)


def cost(**arguments: Any) -> Cost:
    """The logits, and the scores where they are a result; masks and indices are small."""
    logits = arguments["logits"]
    shared = arguments["num_shared_experts"] if arguments["use_shared_as_routed"] else 0
    with_scores = arguments.get("scores") is not None or arguments.get("with_scores", False)
    total = (8 if with_scores else 4) * logits.numel()
    return Cost(bytes=total + 12 * logits.shape[0] * (arguments["num_topk"] + shared))


def _reference(*args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    return reference.moe_topk_gate_forward(*a[:-1], out_dtype=a.out_dtype)


def outputs_with_scores(a: Arguments) -> tuple[Out, Out, Out, Out]:
    choice = Out("choice", (a.logits.shape[0], a.num_topk), a.out_dtype)
    return *a.outputs(), Out("scores", a.logits.shape, torch.float32), choice


def launches_with_scores(
    a: Arguments, topk_idx: Spec, topk_weights: Spec, scores: Spec, choice: Spec
) -> list[Launch | Host]:
    if a.logits.numel() == 0:
        return []
    launch = _launch(a, choice, scores, topk_idx, topk_weights)
    if a.fix_routing_mask is None:
        return [launch]
    return [Host(Tensor.copy_, (choice, a.unmapped_topk_idx)), launch]


def _reference_with_scores(*args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    choice = a.logits.new_empty((a.logits.shape[0], a.num_topk), dtype=a.out_dtype)
    if a.unmapped_topk_idx is not None:
        choice.copy_(a.unmapped_topk_idx)
    scores = torch.empty_like(a.logits)
    return *_reference(*a._replace(unmapped_topk_idx=choice, scores=scores)), scores, choice


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    topk_idx, weights, scores, choice = output
    ctx.factor, ctx.scoring_func = a.routed_scaling_factor, a.scoring_func
    ctx.save_for_backward(weights, scores, choice)
    ctx.mark_non_differentiable(topk_idx, choice)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, _idx: Any, grad_weights: Tensor | None, grad_scores: Tensor | None, _choice: Any
) -> tuple[Any, ...]:
    weights, scores, choice = ctx.saved_tensors  # other tokens have no choice, and scores of 0
    columns = choice.shape[1]
    if grad_weights is None:
        grad_weights = torch.zeros_like(weights)
    elif grad_weights.stride(-1) != 1:
        grad_weights = grad_weights.contiguous()
    grad = moe_topk_gate_backward(
        scores, choice, weights[:, :columns], grad_weights[:, :columns], ctx.factor,
        ctx.scoring_func, grad_scores=None if grad_scores is None else grad_scores.contiguous(),
    )  # fmt: skip
    return grad, *(None,) * (len(Arguments._fields) - 1)


_DYNAMIC = {
    "logits": 1,
    "mask": 0,
    "image_token_mask": 0,
    "fix_routing_mask": 0,
    "unmapped_topk_idx": 1,
    "force_random": 0,
    "scores": 1,
}


def _operator(name: str, mutates: tuple[str, ...] = (), serves: str | None = None) -> Operator:
    return Operator(
        name,
        Arguments,
        reference=_reference,
        cost=cost,
        dynamic=_DYNAMIC,
        out=("out", "out_weights"),
        mutates=mutates,
        differentiable=False,
        serves=serves,
    )


MOE_TOPK_GATE_FORWARD = _operator("moe.moe_topk_gate_forward")

# By whether the choice and the scores are written: the dispatcher has no optional argument that is.
_WRITING = {
    (False, False): MOE_TOPK_GATE_FORWARD,
    (True, False): _operator(
        "moe._moe_topk_gate_choice", ("unmapped_topk_idx",), "moe_topk_gate_forward"
    ),
    (False, True): _operator("moe._moe_topk_gate_scores", ("scores",), "moe_topk_gate_forward"),
    (True, True): _operator(
        "moe._moe_topk_gate_both", ("unmapped_topk_idx", "scores"), "moe_topk_gate_forward"
    ),
}

_SCORES = Arguments._fields.index("scores")

# For calls with a gradient. All are results: what the gradient needs, and the scores have one too.
_WITH_SCORES = Operator(
    "moe._moe_topk_gate_with_scores",
    Arguments,
    outputs=outputs_with_scores,
    launches=launches_with_scores,
    reference=_reference_with_scores,
    dynamic=_DYNAMIC,
    backward=_backward,
    setup_context=_setup,
    serves="moe_topk_gate_forward",
)


@MOE_TOPK_GATE_FORWARD.public(
    reference=reference.moe_topk_gate_forward, mutates=("unmapped_topk_idx", "scores")
)
def moe_topk_gate_forward(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    scores: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    with_scores: bool = False,
) -> tuple[Tensor, ...]:
    """Finds the experts of each token and their weights, with another bias for image tokens.

    For each token, the first rule that applies:

    1. Where `mask` is False: experts -1, weights 0.
    2. Where `force_random` is True: distinct random experts of all physical ones in all slots, and
       random weights in `(0, 1]`, for load tests. They depend on `ep_rank`, the token's index and
       the slot alone (Philox), so that every call draws the same ones.
    3. Where `fix_routing_mask` is True: the experts in `unmapped_topk_idx`.
    4. The experts with the largest score + bias (softmax: logit + bias), best first, ties to the
       smaller index. Image tokens have `image_bias`, others `bias`; None is 0.

    Weights of 3 and 4 are `score / (1e-20 + sum of the chosen scores) * routed_scaling_factor`,
    summed in slot order. A fixed choice outside `0..num_experts-1` has weight 0 and is not in the
    sum. Shared experts follow with weight 1. With a map, token `t` takes replica
    `(ep_rank + 23333 t) mod logical_count` of its experts, shared ones included. NaN ranks above
    `+inf` and gives NaN weights.

    The weights, and the scores as a result or in a buffer, are differentiable with respect to the
    logits, where the rules 3 and 4 apply. A loss of the scores balances the experts.

    Args:
        logits: `[num_tokens, num_experts]`, float32, contiguous; up to 16384 experts.
        num_topk: Experts per token; with the shared ones at most 32.
        use_shared_as_routed: Append slots for the shared experts `num_experts...`.
        num_shared_experts: The number of shared experts.
        routed_scaling_factor: Multiplies the normalized weights.
        ep_rank: This expert-parallel rank: where the replicas of an expert start, and the seed.
        scoring_func: `"sqrtsoftplus"`, `"sigmoid"` or `"softmax"` (`scoring.ScoringFunc`).
        mask: `num_tokens` elements, bool, or None: which tokens route.
        bias: `[num_experts]`, float32, contiguous, or None; added for ranking only.
        image_bias: As `bias`, for image tokens; with `image_token_mask`, or None.
        image_token_mask: `[num_tokens]`, bool, contiguous, or None.
        fix_routing_mask: `[num_tokens]`, bool, contiguous, or None.
        to_physical_map: `[num_experts + shared, columns]`, int32, or None: the physical experts
            that are replicas of a logical one.
        logical_count: `[num_experts + shared]`, int32, or None: the replicas in use of an expert.
        unmapped_topk_idx: `[num_tokens, num_topk]`, dtype of the indices, `stride(1) == 1`, or
            None; read for fixed tokens, written for all: the choice before the map, or -1.
        force_random: `[num_tokens]`, bool, contiguous, or None.
        out: Buffers `(topk_idx, topk_weights)` that are filled and returned; not with gradients.
        scores: `[num_tokens, num_experts]`, float32, contiguous, or None; filled with the scores,
            0 for tokens of the rules 1 and 2.
        out_dtype: The dtype of the indices: int64 (the default) or int32.
        with_scores: Whether the scores are returned.

    Returns:
        `(topk_idx, topk_weights)`: both `[num_tokens, num_topk + shared]`, contiguous, integers and
        float32; with `with_scores` also `scores`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape, a layout or a number is out of range.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, -1.0, 2.0], [0.5, 0.5, 3.0, -2.0]])
        >>> idx, weights = moe_topk_gate_forward(logits, 2, False, 0, 1.5, 0)
        >>> idx.tolist()
        [[3, 1], [2, 0]]
    """
    if out_dtype is None:
        out_dtype = torch.int64
        if unmapped_topk_idx is not None and unmapped_topk_idx.dtype is torch.int32:
            out_dtype = torch.int32
    arguments: list[Any] = [
        logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank,
        scoring_func, mask, bias, image_bias, image_token_mask, fix_routing_mask, to_physical_map,
        logical_count, unmapped_topk_idx, force_random, scores, out_dtype,
    ]  # fmt: skip
    trained = isinstance(logits, Tensor) and logits.requires_grad and torch.is_grad_enabled()
    MOE_TOPK_GATE_FORWARD.require(_check_with_scores, with_scores)
    if not torch.compiler.is_compiling():
        if trained:
            for name, buffer in (("unmapped_topk_idx", unmapped_topk_idx), ("scores", scores)):
                MOE_TOPK_GATE_FORWARD.require(checks.writable, name, buffer)
        else:
            refuse_tangents("moe_topk_gate_forward", (logits,))
    if not trained:
        if with_scores and scores is None and isinstance(logits, Tensor):
            arguments[_SCORES] = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gate = _WRITING[unmapped_topk_idx is not None, arguments[_SCORES] is not None]
        results = gate(*arguments, out=out)
        return (*results, arguments[_SCORES]) if with_scores else results
    if out is not None:
        MOE_TOPK_GATE_FORWARD.require(_refuse_out)
    topk_idx, topk_weights, all_scores, choice = _WITH_SCORES(*arguments)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(choice)
    if scores is not None:
        scores.copy_(all_scores)
    return (topk_idx, topk_weights, all_scores) if with_scores else (topk_idx, topk_weights)


def _check_with_scores(with_scores: bool) -> None:
    checks.boolean("with_scores", with_scores)


def _refuse_out() -> None:
    raise ValueError("out cannot be given with gradients")


moe_topk_gate = checks.named_errors(moe_topk_gate_forward, "moe_topk_gate", __name__)


# ---- backward -----------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    scores: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad_topk_weights: Tensor
    routed_scaling_factor: float
    scoring_func: str
    mask: Tensor | None
    grad_scores_sum: Tensor | None
    grad_scores: Tensor | None

    def check(self) -> None:
        check_scores("scores", self.scores, MAX_EXPERTS)
        num_tokens, num_experts = self.scores.shape
        checks.tensor(
            "topk_idx", self.topk_idx, ("num_tokens", "num_topk"), checks.INTEGERS,
            shape=(num_tokens, None), contiguous=True,
        )  # fmt: skip
        if not 1 <= self.topk_idx.shape[1] <= MAX_SLOTS:
            raise ValueError(
                f"topk_idx must have 1..{MAX_SLOTS} columns, got {self.topk_idx.shape[1]}"
            )
        for name in ("topk_weights", "grad_topk_weights"):
            checks.tensor(
                name, getattr(self, name), ("num_tokens", "num_topk"), torch.float32,
                shape=tuple(self.topk_idx.shape), unit_inner_stride=True,
            )  # fmt: skip
        checks.number("routed_scaling_factor", self.routed_scaling_factor)
        gates.check_scoring(self.scoring_func)
        gates.check_mask(self.mask, num_tokens)
        if self.grad_scores_sum is not None:
            checks.tensor(
                "grad_scores_sum", self.grad_scores_sum, ("num_sequences", "num_experts"),
                torch.float32, shape=(None, num_experts), contiguous=True,
            )  # fmt: skip
            sequences = self.grad_scores_sum.shape[0]
            if sequences < 1 or num_tokens % sequences:
                raise ValueError(
                    f"grad_scores_sum must have rows that divide the {num_tokens} tokens, got "
                    f"{sequences}"
                )
        if self.grad_scores is not None:
            checks.tensor(
                "grad_scores", self.grad_scores, ("num_tokens", "num_experts"), torch.float32,
                shape=(num_tokens, num_experts), contiguous=True,
            )  # fmt: skip

    def outputs(self) -> Out:
        return Out("out", self.scores.shape, torch.float32)

    def launches(self, out: Spec) -> Launch | None:
        if self.scores.numel() == 0:
            return None
        given = (self.scores, self.grad_scores_sum, self.grad_scores, out)
        problem = (
            self.scores.shape[1], self.topk_idx.shape[1],
            int(ScoringFunc.from_str(self.scoring_func)), self.mask is not None,
            self.grad_scores_sum is not None, self.grad_scores is not None,
            dtype_name(self.topk_idx), alignment(*(x for x in given if x is not None)),
        )  # fmt: skip
        arguments = (
            self.scores, self.topk_idx, self.topk_weights, self.grad_topk_weights,
            gates.flat_mask(self), self.grad_scores_sum, self.grad_scores, out,
            float(self.routed_scaling_factor), Size(_tokens_per_sequence),
        )  # fmt: skip
        return Launch(_BACKWARD, problem, arguments)

    def check_values(self) -> None:
        checks.in_range("topk_idx", self.topk_idx, -1, self.scores.shape[1] - 1)


def _tokens_per_sequence(a: BackwardArguments) -> int:
    return 1 if a.grad_scores_sum is None else a.scores.shape[0] // a.grad_scores_sum.shape[0]


def backward_cost(
    scores: Tensor,
    topk_idx: Tensor,
    grad_scores_sum: Tensor | None = None,
    grad_scores: Tensor | None = None,
    scoring_func: str = "",
    **_: Any,
) -> Cost:
    """Every gradient is written; softmax and gradients of scores read every score."""
    tables = 1 + (grad_scores is not None)
    if grad_scores_sum is not None or grad_scores is not None or scoring_func.lower() == "softmax":
        tables += 1
    return Cost(bytes=4 * tables * scores.numel() + 20 * topk_idx.numel())


MOE_TOPK_GATE_BACKWARD = Operator(
    "moe.moe_topk_gate_backward",
    BackwardArguments,
    reference=lambda *args: reference.moe_topk_gate_backward(*args[:-1], grad_scores=args[-1]),
    cost=backward_cost,
    dynamic={
        "scores": 1,
        "topk_idx": 1,
        "topk_weights": 1,
        "grad_topk_weights": 1,
        "mask": 0,
        "grad_scores_sum": 1,
        "grad_scores": 1,
    },
    out=("out",),
)


@MOE_TOPK_GATE_BACKWARD.public(reference=reference.moe_topk_gate_backward)
def moe_topk_gate_backward(
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    grad_topk_weights: Tensor,
    routed_scaling_factor: float,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    grad_scores_sum: Tensor | None = None,
    out: Tensor | None = None,
    *,
    grad_scores: Tensor | None = None,
) -> Tensor:
    """Computes the gradient of `moe_topk_gate_forward` for the logits, from its scores.

    With scores `u`, those of the chosen experts `u_j`, `D = 1e-20 + sum_j u_j`, their weights `w`
    and the incoming gradient `g`, the gradient of a chosen score is
    `(factor * g_j - sum_k g_k w_k) / D`; repeated experts add up. A loss of the normalized scores
    `u_e / sum_e u_e`, summed over the tokens of a sequence, whose gradient is `h`, adds
    `(h_e - sum(h u) / sum(u)) / sum(u)`, which is 0 where the scores of a token are. Then comes the
    derivative of the scoring function.

    Args:
        scores: `[num_tokens, num_experts]`, float32, contiguous: what the gate wrote.
        topk_idx: `[num_tokens, num_topk]`, int32 or int64, contiguous: the choice before the map
            (`unmapped_topk_idx`), without shared experts. Other numbers than experts have no part.
        topk_weights: `[num_tokens, num_topk]`, float32, any row stride: the weights of the gate.
        grad_topk_weights: Their gradient, in the same form.
        routed_scaling_factor, scoring_func: As in `moe_topk_gate_forward`.
        mask: `num_tokens` elements, bool, or None; where it is False the gradient is 0.
        grad_scores_sum: `[num_sequences, num_experts]`, float32, contiguous, or None: `h`. All
            sequences have `num_tokens / num_sequences` tokens.
        out: A buffer for the result, which is filled and returned.
        grad_scores: `[num_tokens, num_experts]`, float32, contiguous, or None: a gradient of the
            scores themselves.

    Returns:
        `[num_tokens, num_experts]`, float32, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape, a layout or a name differs.

    Example:
        >>> scores, idx = torch.full((1, 3), 0.5), torch.tensor([[0, 1]])
        >>> weights, grad = torch.full((1, 2), 0.5), torch.tensor([[1.0, 0.0]])
        >>> moe_topk_gate_backward(scores, idx, weights, grad, 1.0, "sigmoid").tolist()
        [[0.125, -0.125, 0.0]]
    """
    return MOE_TOPK_GATE_BACKWARD(
        scores, topk_idx, topk_weights, grad_topk_weights, routed_scaling_factor, scoring_func,
        mask, grad_scores_sum, grad_scores, out=out,
    )  # fmt: skip
