"""`topk_weights` and `normalize_weight`: the weights of the chosen experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.arguments import check_slots
from tile_kernels.moe.gates import check_scoring
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.weight import reference
from tile_kernels.moe.weight.plan import plan_normalize, plan_topk, plan_topk_backward
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_TOPK = Kernel("tile_kernels.moe.weight.kernel", "topk_weights", plan_topk)
_TOPK_BACKWARD = Kernel(
    "tile_kernels.moe.weight.kernel", "topk_weights_backward", plan_topk_backward
)
_NORMALIZE = Kernel("tile_kernels.moe.weight.kernel", "normalize_weight", plan_normalize)


# ---- weights of a given choice ------------------------------------------------------------------


class TopkArguments(NamedTuple):
    logits: Tensor
    topk_idx: Tensor
    scoring_func: str
    routed_scaling_factor: float

    def check(self) -> None:
        checks.tensor(
            "logits", self.logits, ("num_tokens", "num_experts"), torch.float32, contiguous=True
        )
        if self.logits.shape[1] < 1:
            raise ValueError("logits must have at least one expert, got 0")
        check_slots("topk_idx", self.topk_idx, num_tokens=self.logits.shape[0])
        if not 1 <= self.topk_idx.shape[1] <= MAX_SLOTS:
            raise ValueError(
                f"topk_idx must have 1..{MAX_SLOTS} columns, got {self.topk_idx.shape[1]}"
            )
        check_scoring(self.scoring_func)
        checks.number("routed_scaling_factor", self.routed_scaling_factor)

    def outputs(self) -> Out:
        return Out("topk_weights", self.topk_idx.shape, torch.float32)

    def launches(self, weights: Spec) -> Launch | None:
        if self.topk_idx.numel() == 0:
            return None
        scoring = int(ScoringFunc.from_str(self.scoring_func))
        problem = (self.logits.shape[1], self.topk_idx.shape[1], scoring, alignment(self.logits))
        arguments = (self.logits, self.topk_idx, weights, float(self.routed_scaling_factor))
        return Launch(_TOPK, problem, arguments)

    def check_values(self) -> None:
        checks.in_range("topk_idx", self.topk_idx, -1, self.logits.shape[1] - 1)


def topk_cost(logits: Tensor, topk_idx: Tensor, scoring_func: str = "", **_: Any) -> Cost:
    """Softmax reads every logit, the others those of the chosen experts."""
    read = logits.numel() if scoring_func.lower() == "softmax" else topk_idx.numel()
    return Cost(bytes=4 * read + 12 * topk_idx.numel())


def _topk_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    a = TopkArguments(*inputs)
    ctx.save_for_backward(a.logits, a.topk_idx)
    ctx.scoring_func, ctx.factor = a.scoring_func, a.routed_scaling_factor


def _topk_backward(ctx: Any, grad_weights: Tensor) -> tuple[Any, ...]:
    logits, topk_idx = ctx.saved_tensors
    grad = reference.topk_weights_backward(
        grad_weights, logits, topk_idx, ctx.scoring_func, ctx.factor
    )
    return grad, None, None, None


TOPK_WEIGHTS = Operator(
    "moe.topk_weights",
    TopkArguments,
    reference=reference.topk_weights,
    cost=topk_cost,
    dynamic={"logits": 1, "topk_idx": 1},
    backward=_topk_backward,
    setup_context=_topk_setup,
)


@TOPK_WEIGHTS.public()
def topk_weights(
    logits: Tensor,
    topk_idx: Tensor,
    scoring_func: str = "sigmoid",
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Computes the weights of experts that were chosen elsewhere, differentiable in the logits.

    A weight is `score / (1e-20 + sum of the chosen scores) * routed_scaling_factor`, summed in slot
    order: step 2 of `top2_sum_gate`. With `topk_gate` it is the plain top-k router.

    Args:
        logits: `[num_tokens, num_experts]`, float32, contiguous.
        topk_idx: `[num_tokens, num_topk]`, int64, contiguous, up to 32 columns. Entries outside
            `0..num_experts-1` get weight 0 and are not in the sum; repeated experts count twice.
        scoring_func: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"` (`scoring.ScoringFunc`).
        routed_scaling_factor: Multiplies the normalized weights.

    Returns:
        `[num_tokens, num_topk]`, float32, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape, a layout or a name differs.

    Example:
        >>> topk_weights(torch.zeros(1, 4), torch.tensor([[2, -1, 0]])).tolist()
        [[0.5, 0.0, 0.5]]
    """
    return TOPK_WEIGHTS(logits, topk_idx, scoring_func, routed_scaling_factor)


# ---- their gradient -----------------------------------------------------------------------------


class TopkBackwardArguments(NamedTuple):
    grad_weights: Tensor
    logits: Tensor
    topk_idx: Tensor
    scoring_func: str
    routed_scaling_factor: float

    def check(self) -> None:
        TopkArguments(*self[1:]).check()
        checks.tensor(
            "grad_weights", self.grad_weights, ("num_tokens", "num_topk"), torch.float32,
            shape=tuple(self.topk_idx.shape), contiguous=True,
        )  # fmt: skip

    def outputs(self) -> Out:
        return Out("grad_logits", self.logits.shape, torch.float32)

    def launches(self, grad_logits: Spec) -> Launch | None:
        if self.topk_idx.numel() == 0:
            return None
        scoring = int(ScoringFunc.from_str(self.scoring_func))
        aligned = alignment(self.logits, grad_logits)
        problem = (self.logits.shape[1], self.topk_idx.shape[1], scoring, aligned)
        arguments = (
            self.grad_weights, self.logits, self.topk_idx, grad_logits,
            float(self.routed_scaling_factor),
        )  # fmt: skip
        return Launch(_TOPK_BACKWARD, problem, arguments)

    def check_values(self) -> None:
        checks.in_range("topk_idx", self.topk_idx, -1, self.logits.shape[1] - 1)


def topk_backward_cost(logits: Tensor, topk_idx: Tensor, scoring_func: str = "", **_: Any) -> Cost:
    """Every gradient is written; softmax reads every logit."""
    forward = topk_cost(logits, topk_idx, scoring_func)
    return Cost(bytes=4 * logits.numel() + forward.bytes)


TOPK_WEIGHTS_BACKWARD = Operator(
    "moe.topk_weights_backward",
    TopkBackwardArguments,
    reference=reference.topk_weights_backward,
    cost=topk_backward_cost,
    dynamic={"grad_weights": 1, "logits": 1, "topk_idx": 1},
)


@TOPK_WEIGHTS_BACKWARD.public()
def topk_weights_backward(
    grad_weights: Tensor,
    logits: Tensor,
    topk_idx: Tensor,
    scoring_func: str,
    routed_scaling_factor: float,
) -> Tensor:
    """Computes the gradient of `topk_weights` with respect to the logits.

    With scores `s` of the chosen experts, their sum `S` and the factor `c`, a weight is `c s / S`;
    so the gradient of a score is `c (g - sum(g s) / S) / S`, times the derivative of the scoring
    function. Experts that were not chosen have 0, unless scores are softmax's.

    Args:
        grad_weights: `[num_tokens, num_topk]`, float32, contiguous.
        logits, topk_idx, scoring_func, routed_scaling_factor: As in `topk_weights`. Repeated
            experts add up, in slot order.

    Returns:
        `[num_tokens, num_experts]`, float32, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape, a layout or a name differs.

    Example:
        >>> chosen, grad = torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]])
        >>> topk_weights_backward(grad, torch.zeros(1, 3), chosen, "sigmoid", 1.0).tolist()
        [[0.125, -0.125, 0.0]]
    """
    return TOPK_WEIGHTS_BACKWARD(
        grad_weights, logits, topk_idx, scoring_func, routed_scaling_factor
    )


# ---- normalization of given weights -------------------------------------------------------------


class NormalizeArguments(NamedTuple):
    topk_weights: Tensor

    def check(self) -> None:
        check_slots("topk_weights", self.topk_weights, torch.float32)
        if self.topk_weights.shape[1] < 1:
            raise ValueError("topk_weights must have at least one column, got 0")

    def outputs(self) -> tuple[Out, Out]:
        shape = self.topk_weights.shape
        return Out("denominator", shape[:1], torch.float32), Out("normalized", shape, torch.float32)

    def launches(self, denominator: Spec, normalized: Spec) -> Launch | None:
        if self.topk_weights.numel() == 0:
            return None
        problem = (self.topk_weights.shape[1], alignment(self.topk_weights))
        return Launch(_NORMALIZE, problem, (self.topk_weights, denominator, normalized))


def normalize_cost(topk_weights: Tensor) -> Cost:
    return Cost(bytes=8 * topk_weights.numel() + 4 * topk_weights.shape[0])


def _normalize_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*output)


def _normalize_backward(ctx: Any, grad_denominator: Tensor, grad_normalized: Tensor) -> Tensor:
    denominator, normalized = ctx.saved_tensors
    shared = (grad_normalized * normalized).sum(1, keepdim=True)
    return (grad_normalized - shared) / denominator[:, None] + grad_denominator[:, None]


NORMALIZE_WEIGHT = Operator(
    "moe.normalize_weight",
    NormalizeArguments,
    reference=reference.normalize_weight,
    cost=normalize_cost,
    dynamic={"topk_weights": 1},
    backward=_normalize_backward,
    setup_context=_normalize_setup,
)


@NORMALIZE_WEIGHT.public()
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divides the weights of each token by their sum.

    `denominator = 1e-20 + w[0] + w[1] + ...`, added in that order and rounded at each step;
    `normalized = w / denominator`, correctly rounded. A row of zeros stays zeros. Both results are
    differentiable.

    Args:
        topk_weights: `[num_tokens, num_topk]`, float32, contiguous, at least one column.

    Returns:
        `(denominator, normalized)`: `[num_tokens]` and `[num_tokens, num_topk]`, float32,
        contiguous.

    Raises:
        TypeError: If `topk_weights` has another dtype.
        ValueError: If `topk_weights` has another rank, is not contiguous or has no columns.

    Example:
        >>> normalize_weight(torch.tensor([[1.0, 2.0, 3.0, 2.0]]))[0].tolist()
        [8.0]
    """
    return NORMALIZE_WEIGHT(topk_weights)
