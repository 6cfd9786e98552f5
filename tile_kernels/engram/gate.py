"""The gate that adds what the tables hold to each residual stream, and its gradients."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.engram.cases.gate import ENGRAM_GATE_BWD, ENGRAM_GATE_FWD
from tile_kernels.engram.parts import count_parts
from tile_kernels.engram.weights import fused_weight
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import face, gradient, last_gradients, op
from tile_kernels.torch import engram as oracles

MOST_STREAMS = 8
VECTOR = 8  # bfloat16 of 16 bytes

_GATE = Kernel("tile_kernels.engram.kernels.gate", "gate")
_GRADIENTS = Kernel("tile_kernels.engram.kernels.gate_gradients", "gate_gradients")


def _accessible(x: Tensor) -> Tensor:
    """`x`, or a copy where its rows do not start at multiples of 16 bytes."""
    if alignment(x) == 16 and all(stride % VECTOR == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _check_rows(hidden_states: Tensor, k: Tensor, v: Tensor) -> None:
    dims = ("num_tokens", "hc", "hidden")
    checks.tensor("hidden_states", hidden_states, dims, torch.bfloat16, contiguous=True)
    num_tokens, streams, hidden = hidden_states.shape
    if not 1 <= streams <= MOST_STREAMS:
        raise ValueError(f"hidden_states must have 1..{MOST_STREAMS} streams, got {streams}")
    if hidden < VECTOR or hidden % VECTOR:
        raise ValueError(f"hidden_states must have a multiple of {VECTOR} columns, got {hidden}")
    checks.tensor(
        "k", k, dims, torch.bfloat16, shape=(num_tokens, streams, hidden), unit_inner_stride=True
    )
    checks.tensor(
        "v", v, ("num_tokens", "hidden"), torch.bfloat16, shape=(num_tokens, hidden),
        unit_inner_stride=True,
    )  # fmt: skip


def _check_inputs(hidden_states: Tensor, k: Tensor, v: Tensor, weight_fused: Tensor) -> None:
    _check_rows(hidden_states, k, v)
    checks.tensor(
        "weight_fused", weight_fused, ("hc", "hidden"), torch.float32,
        shape=tuple(hidden_states.shape[1:]), contiguous=True,
    )  # fmt: skip


def _check_clamp(clamp_value: float) -> None:
    checks.number("clamp_value", clamp_value)
    if not isinstance(clamp_value, torch.SymFloat) and math.isnan(clamp_value):
        raise ValueError("clamp_value must be a number, got nan")


# ---- forward ------------------------------------------------------------------------------------


def _check_fwd(*arguments: Any) -> None:
    *inputs, eps, clamp_value, add_residual = arguments
    _check_inputs(*inputs)
    checks.epsilon("eps", eps)
    _check_clamp(clamp_value)
    checks.boolean("add_residual", add_residual)


def _launch_gate(saved: tuple[Tensor | None, ...], *arguments: Any) -> Tensor:
    *inputs, eps, clamp_value, add_residual = arguments
    _, streams, hidden = inputs[0].shape
    out = torch.empty_like(inputs[0])
    if nonempty(out):
        _GATE.launch(
            (streams, hidden, saved[0] is not None, add_residual),
            *map(_accessible, inputs), out, *saved, float(eps), float(clamp_value),
        )  # fmt: skip
    return out


def _oracle_saving(*arguments: Any) -> tuple[Any, ...]:
    *given, add_residual = arguments
    given += [True, add_residual]
    return oracles.engram_gate_fwd(*given)


def _oracle_plain(*arguments: Any) -> Tensor:
    return _oracle_saving(*arguments)[0]


def _cost_fwd(
    hidden_states: Tensor, v: Tensor, weight_fused: Tensor, save_for_backward: bool = True, **_: Any
) -> Cost:
    num_tokens, streams, _hidden = hidden_states.shape
    return Cost(
        6 * hidden_states.numel()
        + 2 * v.numel()
        + 4 * weight_fused.numel()
        + 16 * num_tokens * streams * save_for_backward,
        9 * hidden_states.numel(),
    )


@op(
    check=_check_fwd,
    oracle=_oracle_saving,
    cost=_cost_fwd,
    cases=ENGRAM_GATE_FWD,
    name="engram_gate_fwd",
)
def _gate_saving(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    add_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, streams, _ = hidden_states.shape
    dot, score, rstd_x, rstd_k = (
        hidden_states.new_empty((num_tokens, streams), dtype=torch.float32) for _ in range(4)
    )
    saved = (dot, score, rstd_x, rstd_k)
    out = _launch_gate(saved, hidden_states, k, v, weight_fused, eps, clamp_value, add_residual)
    return out, *saved


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.clamp_value, ctx.add_residual = inputs[5], inputs[6]
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gate_backward(ctx: Any, grad_out: Tensor, *_saved: Any) -> tuple[Any, ...]:
    arguments: list[Any] = [grad_out, *ctx.saved_tensors, ctx.clamp_value, ctx.add_residual]
    *grads, partial = engram_gate_bwd(*arguments)
    grads = [*grads, partial.sum(0)]
    inputs = (grad_out, *ctx.saved_tensors[:4])
    message = "engram_gate_fwd: there is no second derivative"
    return *last_gradients(message, grads, inputs), None, None, None


gradient(_gate_saving, _gate_backward, setup_context=_save_gate)


@op(
    check=_check_fwd,
    oracle=_oracle_plain,
    differentiable=False,
    serves="engram_gate_fwd",
    signature=inspect.signature(_gate_saving, eval_str=True).replace(return_annotation=Tensor),
)
def _gate_plain(*arguments: Any) -> Tensor:
    return _launch_gate((None, None, None, None), *arguments)


@face(_gate_saving, oracle=oracles.engram_gate_fwd)
def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The value of each token, gated, added to its residual streams; and what a gradient needs.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `hidden_states` | `[num_tokens, hc, hidden]` | bfloat16 | contiguous; `hc` in `1..8` |
    | `k` | `[num_tokens, hc, hidden]` | bfloat16 | stride 1 in the last dimension |
    | `v` | `[num_tokens, hidden]` | bfloat16 | stride 1 in the last dimension |
    | `weight_fused` | `[hc, hidden]`, of `fused_weight` | float32 | contiguous |
    | `eps`, `clamp_value` | | float | in this order |
    | returns `output` | `[num_tokens, hc, hidden]` | bfloat16 | contiguous |
    | returns `dot`, `gate_score`, `rstd_x`, `rstd_k` | `[num_tokens, hc]` | float32 | or None |

    `hidden` is a multiple of 8. In float32, for each token and stream,

        dot    = sum(x * w * k)           rstd_x = 1 / sqrt(mean(x * x) + eps), rstd_k likewise
        s      = dot * rstd_x * rstd_k / sqrt(hidden)
        gate   = sigmoid(sign(s) * sqrt(max(|s|, clamp_value)))
        output = x + gate * v

    with `sign(0) = 0`. `add_residual=False` leaves `x` out of the output. The output has the same
    bits with and without `save_for_backward`. It is differentiable with respect to the four
    tensors. Tensors whose rows do not start at multiples of 16 bytes are copied first.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> x = torch.ones(1, 1, 8).bfloat16()
    >>> output, dot, gate_score, _, _ = engram_gate_fwd(x, x, x[0], torch.ones(1, 8), 0.0, 1e-6)
    >>> dot.item(), round(gate_score.item(), 4), output[0, 0, 0].item()
    (8.0, 0.8431, 1.84375)
    """
    checks.boolean("save_for_backward", save_for_backward)
    arguments = (hidden_states, k, v, weight_fused, eps, clamp_value, add_residual)
    if save_for_backward or (torch.is_grad_enabled() and _any_requires_grad(arguments)):
        results = _gate_saving(*arguments)
        return results if save_for_backward else (results[0], None, None, None, None)
    return _gate_plain(*arguments), None, None, None, None


def _any_requires_grad(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


# ---- backward -----------------------------------------------------------------------------------


def _check_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    add_residual: bool = True,
) -> None:
    _check_inputs(hidden_states, k, v, weight_fused)
    shape = tuple(hidden_states.shape)
    checks.tensor("grad_out", grad_out, ("num_tokens", "hc", "hidden"), torch.bfloat16, shape=shape)
    for name, saved in (
        ("dot", dot),
        ("gate_score", gate_score),
        ("rstd_x", rstd_x),
        ("rstd_k", rstd_k),
    ):
        checks.tensor(
            name, saved, ("num_tokens", "hc"), torch.float32, shape=shape[:2], contiguous=True
        )
    _check_clamp(clamp_value)
    checks.boolean("add_residual", add_residual)


def _oracle_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The oracle, which is told the number of parts."""
    named = inspect.signature(_check_bwd).bind(*args, **kwargs).arguments
    hidden_states = named["hidden_states"]
    num_tokens, streams, hidden = hidden_states.shape
    parts = count_parts(num_tokens, streams, hidden, hidden_states.device)
    return oracles.engram_gate_bwd(**named, num_parts=parts)


@op(
    check=_check_bwd,
    oracle=_oracle_bwd,
    cost=lambda hidden_states, v, weight_fused, dot, **_: Cost(
        10 * hidden_states.numel() + 4 * v.numel() + 12 * weight_fused.numel() + 16 * dot.numel(),
        16 * hidden_states.numel(),
    ),
    cases=ENGRAM_GATE_BWD,
    differentiable=False,  # also of tensors that are still attached to a graph
)
def engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the gate; that of the fused weight as partial sums over tokens.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `grad_out` | `[num_tokens, hc, hidden]` | bfloat16 | any; copied if not contiguous |
    | `hidden_states`, `k`, `v`, `weight_fused` | those of `engram_gate_fwd` | | |
    | `dot`, `gate_score`, `rstd_x`, `rstd_k` | its results | float32 | contiguous |
    | `clamp_value` | | float | |
    | returns `grad_hidden_states`, `grad_k` | `[num_tokens, hc, hidden]` | bfloat16 | contiguous |
    | returns `grad_v` | `[num_tokens, hidden]` | bfloat16 | contiguous |
    | returns `grad_w_partial` | `[parts, hc, hidden]` | float32 | contiguous |

    With `G = sum(grad_out * v)` the gradient of `dot` is

        D = G * gate * (1 - gate) / 2 * sqrt(rstd_x * rstd_k / (sqrt(hidden) * |dot|))

    and 0 where `dot` is 0 or `|s| < clamp_value`. In float32, rounded at the end,

        grad_x = grad_out + D * (k * w - x * dot * rstd_x^2 / hidden)
        grad_k =            D * (x * w - k * dot * rstd_k^2 / hidden)
        grad_v = sum of grad_out * gate over the streams, in their order

    `grad_w_partial` adds up to the gradient of `weight_fused`, the sum of `D * x * k` over tokens;
    `grad_w_reduce` does that. The number of parts depends on the device. Without atomics: the same
    input gives the same bits. `add_residual=False` leaves `grad_out` out of `grad_x`.

    For autograd the results are constants, also of arguments that are attached to a graph.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> x, w = torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 8)
    >>> output, *saved = engram_gate_fwd(x, x, x[0], w, 0.0, 1e-6)
    >>> _, _, grad_v, grad_w_partial = engram_gate_bwd(x, x, x, x[0], w, *saved, 1e-6)
    >>> grad_v[0, 0].item(), tuple(grad_w_partial.shape)
    (0.84375, (1, 1, 8))
    """
    num_tokens, streams, hidden = hidden_states.shape
    parts = count_parts(num_tokens, streams, hidden, hidden_states.device)
    grad_x = torch.empty_like(hidden_states)
    grad_k = torch.empty_like(hidden_states)
    grad_v = hidden_states.new_empty((num_tokens, hidden))
    if not nonempty(hidden_states):
        return grad_x, grad_k, grad_v, weight_fused.new_zeros((parts, streams, hidden))
    partial = weight_fused.new_empty((parts, streams, hidden))
    grad_out = _accessible(grad_out.contiguous())
    _GRADIENTS.launch(
        (streams, hidden, add_residual),
        grad_out, _accessible(hidden_states), _accessible(k), _accessible(v),
        _accessible(weight_fused), dot, gate_score, rstd_x, rstd_k, grad_x, grad_k, grad_v,
        partial, float(clamp_value),
    )  # fmt: skip
    return grad_x, grad_k, grad_v, partial


# ---- both ---------------------------------------------------------------------------------------


def engram_gate(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    add_residual: bool = True,
) -> Tensor:
    """`engram_gate_fwd` with the weights of the two norms instead of their product.

    | argument | shape | dtype |
    |---|---|---|
    | `hidden_states`, `k`, `v` | those of `engram_gate_fwd` | bfloat16 |
    | `weight_hidden`, `weight_embed` | `[hc, hidden]`, contiguous | bfloat16 or float32, alike |
    | `clamp_value`, `eps` | | float, in this order |
    | returns | `[num_tokens, hc, hidden]` | bfloat16 |

    Differentiable with respect to the five tensors.

    >>> x, w = torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 8)
    >>> engram_gate(x, x, x[0], w, w, 1e-6, 0.0)[0, 0, 0].item()
    1.84375
    """
    weight = fused_weight(weight_hidden, weight_embed)
    return engram_gate_fwd(hidden_states, k, v, weight, eps, clamp_value, False, add_residual)[0]
