"""The gate that adds what the tables hold to each residual stream, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.gate import reference
from tile_kernels.engram.gate.plan import VECTOR, count_parts, plan, plan_bwd
from tile_kernels.engram.weight.op import fused_weight
from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import last_gradients
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

MAX_STREAMS = 8
SAVED = ("out", "dot", "gate_score", "rstd_x", "rstd_k")  # the results that a gradient needs

_GATE = Kernel("tile_kernels.engram.gate.kernel", "gate", plan)
_GRADIENTS = Kernel("tile_kernels.engram.gate.kernel", "gate_gradients", plan_bwd)

# Sizes that follow from the number of tokens.
_DYNAMIC = {
    "grad_out": 2, "hidden_states": 2, "k": 2, "v": 1, "dot": 1, "gate_score": 1, "rstd_x": 1,
    "rstd_k": 1, "kv": 2, "image_token_mask": 0,
}  # fmt: skip


def _check_inputs(hidden_states: Tensor, k: Tensor, v: Tensor, weight_fused: Tensor) -> None:
    dims = ("num_tokens", "hc", "hidden")
    checks.tensor("hidden_states", hidden_states, dims, torch.bfloat16, contiguous=True)
    num_tokens, streams, hidden = hidden_states.shape
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"hidden_states must have 1..{MAX_STREAMS} streams, got {streams}")
    if hidden < VECTOR or hidden % VECTOR:
        raise ValueError(f"hidden_states must have a multiple of {VECTOR} columns, got {hidden}")
    checks.tensor(
        "k", k, dims, torch.bfloat16, shape=(num_tokens, streams, hidden), unit_inner_stride=True
    )
    checks.tensor(
        "v", v, ("num_tokens", "hidden"), torch.bfloat16, shape=(num_tokens, hidden),
        unit_inner_stride=True,
    )  # fmt: skip
    checks.tensor(
        "weight_fused", weight_fused, ("hc", "hidden"), torch.float32, shape=(streams, hidden),
        contiguous=True,
    )  # fmt: skip


def _check_mask(mask: Tensor | None, num_tokens: int) -> None:
    if mask is not None:
        checks.tensor(
            "image_token_mask", mask, ("num_tokens",), torch.bool, shape=(num_tokens,),
            contiguous=True,
        )  # fmt: skip


def _check_clamp(clamp_value: float) -> None:
    checks.number("clamp_value", clamp_value)
    if not isinstance(clamp_value, torch.SymFloat) and math.isnan(clamp_value):
        raise ValueError("clamp_value must be a number, got nan")


def _accessible(x: Any) -> Any:
    """`x`, or a copy where its rows do not start at multiples of 16 bytes."""
    if alignment(x) == 16 and all(stride % VECTOR == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone()


# ---- engram_gate_fwd ----------------------------------------------------------------------------


class Arguments(NamedTuple):
    hidden_states: Tensor
    k: Tensor
    v: Tensor
    weight_fused: Tensor
    eps: float
    clamp_value: float
    add_residual: bool
    image_token_mask: Tensor | None

    def check(self) -> None:
        _check_inputs(self.hidden_states, self.k, self.v, self.weight_fused)
        checks.epsilon("eps", self.eps)
        _check_clamp(self.clamp_value)
        checks.boolean("add_residual", self.add_residual)
        _check_mask(self.image_token_mask, self.hidden_states.shape[0])

    def outputs(self) -> tuple[Out, Out, Out, Out, Out]:
        shape = self.hidden_states.shape[:2]
        return (
            outputs_alone(self),
            Out("dot", shape, torch.float32),
            Out("gate_score", shape, torch.float32),
            Out("rstd_x", shape, torch.float32),
            Out("rstd_k", shape, torch.float32),
        )

    def launches(self, output: Spec, *saved: Spec) -> Launch:
        return _launch(self, output, saved)


def outputs_alone(a: Arguments) -> Out:
    return Out("out", a.hidden_states.shape, torch.bfloat16)


def _launch(a: Arguments, output: Spec, saved: tuple[Spec | None, ...]) -> Launch:
    _, streams, hidden = a.hidden_states.shape
    masked = a.image_token_mask is not None
    problem = (streams, hidden, saved[0] is not None, a.add_residual, masked)
    numbers = (float(a.eps), float(a.clamp_value))
    inputs = map(_accessible, a[:4])
    return Launch(_GATE, problem, (*inputs, a.image_token_mask, output, *saved, *numbers))


def launches_alone(a: Arguments, output: Spec) -> Launch:
    return _launch(a, output, (None, None, None, None))


def cost(
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


def _reference(*fields: Any) -> tuple[Any, ...]:
    a = Arguments(*fields)
    return reference.engram_gate_fwd(
        *a[:6], True, a.add_residual, image_token_mask=a.image_token_mask
    )


def _reference_alone(*fields: Any) -> Tensor:
    return _reference(*fields)[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.clamp_value, ctx.add_residual = inputs[5], inputs[6]
    ctx.save_for_backward(*inputs[:4], *output[1:], inputs[7])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_out: Tensor, *_saved: Any) -> tuple[Any, ...]:
    *saved, mask = ctx.saved_tensors
    *grads, partial = ENGRAM_GATE_BWD(grad_out, *saved, ctx.clamp_value, ctx.add_residual, mask)
    grads = [*grads, partial.sum(0)]
    inputs = (grad_out, *saved[:4])
    message = "engram_gate_fwd: there is no second derivative"
    return *last_gradients(message, grads, inputs), None, None, None, None


ENGRAM_GATE_FWD = Operator(
    "engram.engram_gate_fwd",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic=_DYNAMIC,
    out=SAVED,
    backward=_backward,
    setup_context=_save,
)

ENGRAM_GATE_ALONE = Operator(
    "engram._engram_gate_alone",
    Arguments,
    outputs=outputs_alone,
    launches=launches_alone,
    reference=_reference_alone,
    dynamic=_DYNAMIC,
    out=("out",),
    in_place=("hidden_states",),
    differentiable=False,
    serves="engram_gate_fwd",
)


def _check_saving(
    save_for_backward: bool, inplace: bool, trained: bool, out: Any, hidden_states: Any
) -> None:
    checks.boolean("save_for_backward", save_for_backward)
    if trained and out is not None:
        raise ValueError("out cannot be given with gradients")
    if not checks.boolean("inplace", inplace):
        return
    if save_for_backward:
        raise ValueError("inplace must be False with save_for_backward: a gradient needs the input")
    if trained:
        raise ValueError("inplace must be False with gradients, which need the input")
    if out is not None and out is not hidden_states:
        raise ValueError("out must be None with inplace, or hidden_states itself")


def _forward(
    operator: Operator,
    arguments: tuple[Any, ...],
    save_for_backward: bool,
    inplace: bool,
    out: Any,
    apart: Callable[[], Arguments],
) -> Any:
    """Serves both forms of the gate. `apart` gives the arguments with keys and value as two."""
    trained = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in arguments
    )
    operator.require(_check_saving, save_for_backward, inplace, trained, out, arguments[0])
    if save_for_backward or trained:
        results = operator(*arguments, out=out)
        return results if save_for_backward else (results[0], None, None, None, None)
    result = ENGRAM_GATE_ALONE(*apart(), out=arguments[0] if inplace else out)
    return result, None, None, None, None


@ENGRAM_GATE_FWD.public(reference=reference.engram_gate_fwd)
def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    add_residual: bool = True,
    *,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    out: Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Adds the gated value of each token to its residual streams.

    In float32, for each token and stream,

        dot    = sum(x * w * k)           rstd_x = 1 / sqrt(mean(x * x) + eps), rstd_k likewise
        s      = dot * rstd_x * rstd_k / sqrt(hidden)
        gate   = sigmoid(sign(s) * sqrt(max(|s|, clamp_value)))
        output = x + gate * v

    with `sign(0) = 0`. The output has the same bits with and without `save_for_backward`. It is
    differentiable with respect to the four tensors. Tensors whose rows do not start at multiples of
    16 bytes are copied first.

    Image tokens take no value. Their output has the bits of `hidden_states` (0 without the
    residual), and their saved tensors are 0. Their gradients are 0, except that of the residual.

    Args:
        hidden_states: `[num_tokens, hc, hidden]`, bfloat16, contiguous; `hc` is in `1..8`, `hidden`
            a multiple of 8.
        k: `[num_tokens, hc, hidden]`, bfloat16, stride 1 in the last dimension.
        v: `[num_tokens, hidden]`, bfloat16, stride 1 in the last dimension.
        weight_fused: `[hc, hidden]`, float32, contiguous, of `fused_weight`.
        eps: Keeps the norms from dividing by 0; finite and not negative.
        clamp_value: The least magnitude under the square root.
        save_for_backward: Whether to return what `engram_gate_bwd` needs.
        add_residual: Whether the output contains `hidden_states`.
        image_token_mask: `[num_tokens]`, bool, contiguous, True for image tokens; or None.
        inplace: Whether the output is written to `hidden_states`; without `save_for_backward`.
        out: Buffers for the five results, or with `save_for_backward=False` one for the output,
            which may be `hidden_states`; filled and returned. Not with gradients.

    Returns:
        `(output, dot, gate_score, rstd_x, rstd_k)`: `[num_tokens, hc, hidden]`, bfloat16,
        contiguous, then four times `[num_tokens, hc]`, float32, or None without
        `save_for_backward`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> x = torch.ones(1, 1, 8).bfloat16()
        >>> output, dot, gate_score, _, _ = engram_gate_fwd(x, x, x[0], torch.ones(1, 8), 0.0, 1e-6)
        >>> dot.item(), round(gate_score.item(), 4), output[0, 0, 0].item()
        (8.0, 0.8431, 1.84375)
    """
    arguments: tuple[Any, ...] = (
        hidden_states, k, v, weight_fused, eps, clamp_value, add_residual, image_token_mask
    )  # fmt: skip
    return _forward(
        ENGRAM_GATE_FWD, arguments, save_for_backward, inplace, out, lambda: Arguments(*arguments)
    )


# ---- engram_gate_bwd ----------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    grad_out: Tensor
    hidden_states: Tensor
    k: Tensor
    v: Tensor
    weight_fused: Tensor
    dot: Tensor
    gate_score: Tensor
    rstd_x: Tensor
    rstd_k: Tensor
    clamp_value: float
    add_residual: bool = True
    image_token_mask: Tensor | None = None

    def check(self) -> None:
        _check_inputs(self.hidden_states, self.k, self.v, self.weight_fused)
        dims, shape = ("num_tokens", "hc", "hidden"), tuple(self.hidden_states.shape)
        checks.tensor("grad_out", self.grad_out, dims, torch.bfloat16, shape=shape)
        for name, saved in zip(self._fields[5:9], self[5:9]):
            checks.tensor(name, saved, dims[:2], torch.float32, shape=shape[:2], contiguous=True)
        _check_clamp(self.clamp_value)
        checks.boolean("add_residual", self.add_residual)
        _check_mask(self.image_token_mask, shape[0])

    def outputs(self) -> tuple[Out, Out, Out, Out]:
        num_tokens, streams, hidden = self.hidden_states.shape
        parts = count_parts(num_tokens, streams, hidden, self.hidden_states.device)
        return (
            Out("out", (num_tokens, streams, hidden), torch.bfloat16),
            Out("grad_k", (num_tokens, streams, hidden), torch.bfloat16),
            Out("grad_v", (num_tokens, hidden), torch.bfloat16),
            Out("grad_w_partial", (parts, streams, hidden), torch.float32),
        )

    def launches(self, grad_x: Spec, grad_k: Spec, grad_v: Spec, partial: Spec) -> Launch | Host:
        return _launch_bwd(self, grad_x, grad_k, grad_v, partial)


def _launch_bwd(
    a: BackwardArguments, grad_x: Spec, grad_k: Spec, grad_v: Spec | None, partial: Spec
) -> Launch | Host:
    """Without `grad_v` it is the last row of `grad_k`."""
    if a.hidden_states.numel() == 0:
        return Host(Tensor.zero_, (partial,))
    _, streams, hidden = a.hidden_states.shape
    grad_out = _accessible(a.grad_out.contiguous())
    masked = a.image_token_mask is not None
    arguments = (
        grad_out, *map(_accessible, a[1:5]), *a[5:9], a.image_token_mask, grad_x, grad_k, grad_v,
        partial, float(a.clamp_value),
    )  # fmt: skip
    problem = (streams, hidden, a.add_residual, masked, grad_v is None)
    return Launch(_GRADIENTS, problem, arguments)


def cost_bwd(hidden_states: Tensor, v: Tensor, weight_fused: Tensor, dot: Tensor, **_: Any) -> Cost:
    return Cost(
        10 * hidden_states.numel() + 4 * v.numel() + 12 * weight_fused.numel() + 16 * dot.numel(),
        16 * hidden_states.numel(),
    )


def _reference_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference with the number of parts that the kernel has."""
    a = BackwardArguments(*args, **kwargs)
    num_tokens, streams, hidden = a.hidden_states.shape
    parts = count_parts(num_tokens, streams, hidden, a.hidden_states.device)
    return reference.engram_gate_bwd(**a._asdict(), num_parts=parts)


ENGRAM_GATE_BWD = Operator(
    "engram.engram_gate_bwd",
    BackwardArguments,
    reference=_reference_bwd,
    cost=cost_bwd,
    dynamic=_DYNAMIC,
    out=("out", "grad_k", "grad_v", "grad_w_partial"),
    differentiable=False,  # also for tensors that are still attached to a graph
)


@ENGRAM_GATE_BWD.public()
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
    *,
    image_token_mask: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of the gate; that of the fused weight as partial sums over tokens.

    With `G = sum(grad_out * v)` the gradient of `dot` is

        D = G * gate * (1 - gate) / 2 * sqrt(rstd_x * rstd_k / (sqrt(hidden) * |dot|))

    and 0 where `dot` is 0 or `|s| < clamp_value`. In float32, rounded at the end,

        grad_x = grad_out + D * (k * w - x * dot * rstd_x^2 / hidden)
        grad_k =            D * (x * w - k * dot * rstd_k^2 / hidden)
        grad_v = sum of grad_out * gate over the streams, in their order

    `grad_w_partial` adds up to the gradient of `weight_fused`, the sum of `D * x * k` over tokens;
    `grad_w_reduce` computes that sum. The number of parts depends on the device. There are no
    atomics: the same input gives the same bits.

    For autograd the results are constants, also where arguments are attached to a graph.

    Args:
        grad_out: `[num_tokens, hc, hidden]`, bfloat16, any strides; copied if it is not contiguous.
        hidden_states: As in `engram_gate_fwd`.
        k: As in `engram_gate_fwd`.
        v: As in `engram_gate_fwd`.
        weight_fused: As in `engram_gate_fwd`.
        dot: `[num_tokens, hc]`, float32, contiguous: a result of `engram_gate_fwd`.
        gate_score: Likewise.
        rstd_x: Likewise.
        rstd_k: Likewise.
        clamp_value: As in `engram_gate_fwd`.
        add_residual: As in `engram_gate_fwd`; False leaves `grad_out` out of the gradient of
            `hidden_states`.
        image_token_mask: As in `engram_gate_fwd`. Image tokens have the bits of `grad_out` (0
            without the residual) as gradient of `hidden_states`, and 0 for `k`, `v` and the weight.
        out: Buffers for the results, which are filled and returned.

    Returns:
        `(grad_hidden_states, grad_k, grad_v, grad_w_partial)`, all contiguous: twice
        `[num_tokens, hc, hidden]` and `[num_tokens, hidden]` in bfloat16, and
        `[parts, hc, hidden]` in float32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or `clamp_value` is NaN.

    Example:
        >>> x, w = torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 8)
        >>> output, *saved = engram_gate_fwd(x, x, x[0], w, 0.0, 1e-6)
        >>> _, _, grad_v, grad_w_partial = engram_gate_bwd(x, x, x, x[0], w, *saved, 1e-6)
        >>> grad_v[0, 0].item(), tuple(grad_w_partial.shape)
        (0.84375, (1, 1, 8))
    """
    return ENGRAM_GATE_BWD(
        grad_out, hidden_states, k, v, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
        add_residual, image_token_mask, out=out,
    )  # fmt: skip


# ---- keys and value in one tensor ----------------------------------------------------------------


def _keys(kv: Tensor) -> Tensor:
    return kv[:, :-1]


def _value(kv: Tensor) -> Tensor:
    return kv[:, -1]


def _parts(kv: Any) -> tuple[Any, Any]:
    """Keys and value of a tensor, or of a spec."""
    if isinstance(kv, Tensor):
        return _keys(kv), _value(kv)
    kv = _accessible(kv)
    num_tokens, rows, hidden = kv.shape
    by_token = kv.stride(0)
    keys = Spec((num_tokens, rows - 1, hidden), kv.stride(), kv.dtype, kv.device)
    value = Spec((num_tokens, hidden), (by_token, 1), kv.dtype, kv.device)
    return kv.apply(_keys, like=keys), kv.apply(_value, like=value)


def _check_kv(hidden_states: Tensor, kv: Tensor) -> None:
    dims = ("num_tokens", "hc + 1", "hidden")
    checks.tensor("hidden_states", hidden_states, ("num_tokens", "hc", "hidden"), torch.bfloat16)
    num_tokens, streams, hidden = hidden_states.shape
    checks.tensor(
        "kv", kv, dims, torch.bfloat16, shape=(num_tokens, streams + 1, hidden), contiguous=True
    )


class PackedArguments(NamedTuple):
    hidden_states: Tensor
    kv: Tensor
    weight_fused: Tensor
    eps: float
    clamp_value: float
    image_token_mask: Tensor | None

    def apart(self) -> Arguments:
        """The arguments with keys and value as two."""
        weight, eps, clamp, mask = self[2:]
        return Arguments(self.hidden_states, *_parts(self.kv), weight, eps, clamp, True, mask)

    def check(self) -> None:
        _check_kv(self.hidden_states, self.kv)
        self.apart().check()

    def outputs(self) -> tuple[Out, Out, Out, Out, Out]:
        return self.apart().outputs()

    def launches(self, output: Spec, *saved: Spec) -> Launch:
        return _launch(self.apart(), output, saved)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.clamp_value = inputs[4]
    ctx.save_for_backward(*inputs[:3], *output[1:], inputs[5])
    ctx.mark_non_differentiable(*output[1:])


def _backward_packed(ctx: Any, grad_out: Tensor, *_saved: Any) -> tuple[Any, ...]:
    *saved, mask = ctx.saved_tensors
    *grads, partial = ENGRAM_GATE_PACKED_BWD(grad_out, *saved, ctx.clamp_value, mask, True)
    grads = [*grads, partial.sum(0)]
    message = "engram_gate_packed_fwd: there is no second derivative"
    inputs = (grad_out, *saved[:3])
    return *last_gradients(message, grads, inputs), None, None, None


ENGRAM_GATE_PACKED_FWD = Operator(
    "engram.engram_gate_packed_fwd",
    PackedArguments,
    reference=lambda *fields: _reference(*PackedArguments(*fields).apart()),
    cost=lambda kv, **rest: cost(v=kv[:, 0], **rest),
    dynamic=_DYNAMIC,
    out=SAVED,
    backward=_backward_packed,
    setup_context=_save_packed,
)


@ENGRAM_GATE_PACKED_FWD.public(reference=reference.engram_gate_packed_fwd)
def engram_gate_packed_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    *,
    out: Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Computes `engram_gate_fwd` with the keys of all streams and the value in one tensor.

    The result is differentiable with respect to `hidden_states`, `kv` and `weight_fused`.

    Args:
        hidden_states: As in `engram_gate_fwd`.
        kv: `[num_tokens, hc + 1, hidden]`, bfloat16, contiguous: keys, then the value.
        weight_fused: As in `engram_gate_fwd`.
        eps: As in `engram_gate_fwd`.
        clamp_value: As in `engram_gate_fwd`.
        save_for_backward: As in `engram_gate_fwd`.
        image_token_mask: As in `engram_gate_fwd`.
        inplace: As in `engram_gate_fwd`.
        out: As in `engram_gate_fwd`.

    Returns:
        As `engram_gate_fwd`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> import torch
        >>> x, kv = torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 2, 8).bfloat16()
        >>> output, *_ = engram_gate_packed_fwd(x, kv, torch.ones(1, 8), 0.0, 1e-6)
        >>> output[0, 0, 0].item()
        1.84375
    """
    arguments: tuple[Any, ...] = (
        hidden_states, kv, weight_fused, eps, clamp_value, image_token_mask
    )  # fmt: skip

    def apart() -> Arguments:
        ENGRAM_GATE_PACKED_FWD.require(_check_kv, hidden_states, kv)
        return PackedArguments(*arguments).apart()

    operator = ENGRAM_GATE_PACKED_FWD
    return _forward(operator, arguments, save_for_backward, inplace, out, apart)


class PackedBackwardArguments(NamedTuple):
    grad_out: Tensor
    hidden_states: Tensor
    kv: Tensor
    weight_fused: Tensor
    dot: Tensor
    gate_score: Tensor
    rstd_x: Tensor
    rstd_k: Tensor
    clamp_value: float
    image_token_mask: Tensor | None = None
    add_residual: bool = True

    def apart(self) -> BackwardArguments:
        """The arguments with keys and value as two."""
        rest = (*self[3:9], self.add_residual, self.image_token_mask)
        return BackwardArguments(*self[:2], *_parts(self.kv), *rest)  # type: ignore[arg-type]

    def check(self) -> None:
        _check_kv(self.hidden_states, self.kv)
        self.apart().check()

    def outputs(self) -> tuple[Out, Out, Out]:
        grad_x, *_, partial = self.apart().outputs()
        return grad_x, Out("grad_kv", self.kv.shape, torch.bfloat16), partial

    def launches(self, grad_x: Spec, grad_kv: Spec, partial: Spec) -> Launch | Host:
        return _launch_bwd(self.apart(), grad_x, grad_kv, None, partial)


def _reference_packed_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference with the number of parts that the kernel has."""
    a = PackedBackwardArguments(*args, **kwargs)
    num_tokens, streams, hidden = a.hidden_states.shape
    parts = count_parts(num_tokens, streams, hidden, a.hidden_states.device)
    return reference.engram_gate_packed_bwd(**a._asdict(), num_parts=parts)


ENGRAM_GATE_PACKED_BWD = Operator(
    "engram.engram_gate_packed_bwd",
    PackedBackwardArguments,
    reference=_reference_packed_bwd,
    cost=lambda kv, **rest: cost_bwd(v=kv[:, 0], **rest),
    dynamic=_DYNAMIC,
    out=("out", "grad_kv", "grad_w_partial"),
)


@ENGRAM_GATE_PACKED_BWD.public()
def engram_gate_packed_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    *,
    add_residual: bool = True,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `engram_gate_bwd` with the keys of all streams and the value in one tensor.

    Args:
        grad_out: As in `engram_gate_bwd`.
        hidden_states: As in `engram_gate_fwd`.
        kv: As in `engram_gate_packed_fwd`.
        weight_fused: As in `engram_gate_fwd`.
        dot: As in `engram_gate_bwd`.
        gate_score: As in `engram_gate_bwd`.
        rstd_x: As in `engram_gate_bwd`.
        rstd_k: As in `engram_gate_bwd`.
        clamp_value: As in `engram_gate_fwd`.
        image_token_mask: As in `engram_gate_bwd`.
        add_residual: As in `engram_gate_bwd`.
        out: As in `engram_gate_bwd`.

    Returns:
        `(grad_hidden_states, grad_kv, grad_w_partial)`: `[num_tokens, hc, hidden]` and
        `[num_tokens, hc + 1, hidden]` in bfloat16, `[parts, hc, hidden]` in float32; contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or `clamp_value` is NaN.

    Example:
        >>> import torch
        >>> x, kv = torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 2, 8).bfloat16()
        >>> w = torch.ones(1, 8)
        >>> output, *saved = engram_gate_packed_fwd(x, kv, w, 0.0, 1e-6)
        >>> engram_gate_packed_bwd(x, x, kv, w, *saved, 1e-6)[1][0, 1, 0].item()
        0.84375
    """
    return ENGRAM_GATE_PACKED_BWD(
        grad_out, hidden_states, kv, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
        image_token_mask, add_residual, out=out,
    )  # fmt: skip


# ---- both ---------------------------------------------------------------------------------------


@checks.named_errors
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

    The result is differentiable with respect to the five tensors.

    Args:
        hidden_states: As in `engram_gate_fwd`.
        k: As in `engram_gate_fwd`.
        v: As in `engram_gate_fwd`.
        weight_hidden: `[hc, hidden]`, bfloat16 or float32, contiguous.
        weight_embed: `[hc, hidden]`, dtype of `weight_hidden`, contiguous.
        clamp_value: As in `engram_gate_fwd`; it comes before `eps` here.
        eps: As in `engram_gate_fwd`.
        add_residual: As in `engram_gate_fwd`.

    Returns:
        `[num_tokens, hc, hidden]`, bfloat16, contiguous.

    Raises:
        TypeError: As `fused_weight` and `engram_gate_fwd` do.
        ValueError: As `fused_weight` and `engram_gate_fwd` do.

    Example:
        >>> x, w = torch.ones(1, 1, 8).bfloat16(), torch.ones(1, 8)
        >>> engram_gate(x, x, x[0], w, w, 1e-6, 0.0)[0, 0, 0].item()
        1.84375
    """
    weight = fused_weight(weight_hidden, weight_embed)
    return engram_gate_fwd(hidden_states, k, v, weight, eps, clamp_value, False, add_residual)[0]
