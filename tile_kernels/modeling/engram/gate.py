"""The gate as an autograd function that can add gradients to `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import engram as ops
from tile_kernels.runtime.autograd import last_gradients


class EngramGateFn(torch.autograd.Function):
    """The gate with gradients; see `engram_gate`, whose arguments `apply` takes in order.

    With None for `v`, `k` is `[*, hc + 1, H]`, keys and then the value, and so is its gradient.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """The output; dot products, gates and norms are kept, so that nothing is computed twice."""
        hidden_states, k, v, weight_hidden, weight_embed, clamp_value, eps, *options = arguments
        add_residual = options[0] if options else True  # both options may be left out
        mask = options[1] if len(options) > 1 else None
        x, key, value, kv = _rows(hidden_states, k, v)
        fused = ops.fused_weight(weight_hidden, weight_embed)
        output, *saved = ops.engram_gate_fwd(
            x, key, value, fused, eps, clamp_value, True, add_residual, image_token_mask=mask
        )
        keys = (key, value) if kv is None else (kv, None)
        ctx.save_for_backward(x, *keys, weight_hidden, weight_embed, fused, *saved, mask)
        # The objects that a caller gave `main_grad` to: hooks on saved tensors may replace others.
        ctx.weights = weight_hidden, weight_embed
        ctx.settings = clamp_value, add_residual
        ctx.shapes = [tensor.shape for tensor in (hidden_states, k, v) if tensor is not None]
        return output.view(hidden_states.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that are needed; those of weights with `main_grad` are added there."""
        saved = ctx.saved_tensors  # once: a checkpoint gives them a single time
        with torch.no_grad():
            grads = EngramGateFn._gradients(ctx, saved, grad_out)
        message = "engram_gate: there is no second derivative of the gate"
        inputs = (grad_out, *(x for x in saved[:5] if x is not None))
        return *last_gradients(message, grads, inputs), None, None, None, None

    @staticmethod
    def _gradients(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> list[Tensor | None]:
        x, key, value, weight_hidden, weight_embed, fused, *numbers, mask = saved
        dot, gate_score, rstd_x, rstd_k = numbers
        grad_out = grad_out.reshape(x.shape).contiguous()
        clamp_value, add_residual = ctx.settings
        if value is None:
            *grads, partial = ops.engram_gate_packed_bwd(
                grad_out, x, key, fused, dot, gate_score, rstd_x, rstd_k, clamp_value, mask,
                add_residual=add_residual,
            )  # fmt: skip
        else:
            *grads, partial = ops.engram_gate_bwd(
                grad_out, x, key, value, fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
                add_residual, image_token_mask=mask,
            )  # fmt: skip
        needed = ctx.needs_input_grad
        input_grads: list[Tensor | None] = [
            grad.view(shape) if need else None
            for grad, shape, need in zip(grads, ctx.shapes, needed)
        ]
        input_grads += [None] * (3 - len(input_grads))
        if not any(needed[3:5]):
            return [*input_grads, None, None]
        weights = weight_hidden, weight_embed
        return [*input_grads, *_weight_gradients(partial, weights, ctx.weights, needed[3:5])]


_WEIGHTS = ("weight_hidden", "weight_embed")


def engram_gate(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor | None,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    add_residual: bool = True,
    *,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Adds a value to each residual stream, scaled by how well the stream matches its key.

    The result is `hidden_states + gate * v`, or `gate * v` with `add_residual=False`. The gate of a
    stream is `sigmoid(sign(s) * sqrt(max(|s|, clamp_value)))`, where `s` is the dot product of the
    stream and its key, both after RMSNorm with `eps`, divided by `sqrt(H)`. Note the order:
    `clamp_value`, `eps`.

    It is differentiable once in all tensors. If a weight has an attribute `main_grad` (float32,
    contiguous, `[hc, H]`) when the gradient is computed, the gradient is added to it in place, and
    `.grad` stays None. Inside `torch.compile` such a call runs eagerly, or raises with
    `fullgraph=True`.

    Args:
        hidden_states: `[*, hc, H]`, bfloat16: the streams.
        k: `[*, hc, H]`, bfloat16: the keys. Without `v`: `[*, hc + 1, H]`, keys and then the value.
        v: `[*, H]`, bfloat16: the values, or None.
        weight_hidden: `[hc, H]`, bfloat16 or float32: the weight of the norm of the streams.
        weight_embed: `[hc, H]`, dtype of `weight_hidden`: the weight of the norm of the keys.
        clamp_value: The least absolute value of `s` under the square root.
        eps: The epsilon of both norms.
        add_residual: Whether `hidden_states` is added.
        image_token_mask: bool, an element for each token, True for those that take no value; or
            None.

    Returns:
        `[*, hc, H]`, bfloat16.

    Example:
        >>> x = torch.randn(2, 3, 4, 64).bfloat16().requires_grad_()
        >>> k, v, weight = torch.randn_like(x), torch.randn(2, 3, 64).bfloat16(), torch.ones(4, 64)
        >>> out = engram_gate(x, k, v, weight.bfloat16(), weight.bfloat16(), 1e-6, 1e-20)
        >>> out.sum().backward()
        >>> out.shape, x.grad.shape
        (torch.Size([2, 3, 4, 64]), torch.Size([2, 3, 4, 64]))
    """
    tensors = (hidden_states, k, v, weight_hidden, weight_embed)
    weights = (weight_hidden, weight_embed)
    mask = None if image_token_mask is None else image_token_mask.reshape(-1)
    if torch.compiler.is_compiling():
        for name, weight in zip(_WEIGHTS, weights):
            if weight.requires_grad and getattr(weight, "main_grad", None) is not None:
                raise RuntimeError(
                    f"engram_gate: {name} has a main_grad, which a compiled graph cannot add to"
                )
    elif torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    ):
        result: Tensor = EngramGateFn.apply(*tensors, clamp_value, eps, add_residual, mask)
        return result
    fused = ops.fused_weight(*weights)
    x, key, value, kv = _rows(hidden_states, k, v)
    if kv is None or not add_residual:
        output, *_ = ops.engram_gate_fwd(
            x, key, value, fused, eps, clamp_value, False, add_residual, image_token_mask=mask
        )
    else:
        output, *_ = ops.engram_gate_packed_fwd(x, kv, fused, eps, clamp_value, False, mask)
    return output.view(hidden_states.shape)


def _check(hidden_states: Tensor, k: Tensor, v: Tensor | None) -> None:
    shape = tuple(hidden_states.shape)
    if len(shape) < 2:
        raise ValueError(f"engram_gate: hidden_states must be [*, hc, H], got {list(shape)}")
    *leading, streams, hidden = shape
    expected = {"k": shape} if v is not None else {"k": (*leading, streams + 1, hidden)}
    if v is not None:
        expected["v"] = (*leading, hidden)
    for (name, wanted), tensor in zip(expected.items(), (k, v)):
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ValueError(
                f"engram_gate: {name} must be {list(wanted)} for hidden_states of "
                f"{list(shape)}, got {list(tensor.shape)}"
            )


def _rows(
    hidden_states: Tensor, k: Tensor, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Streams, keys and value with all leading dimensions as one, and keys and value together.

    The last is None for two tensors. Slices of a wider tensor stay slices where they can. Shapes
    are checked first, since a key of another shape may have as many elements.
    """
    _check(hidden_states, k, v)
    num_streams, hidden = hidden_states.shape[-2:]
    num_tokens = hidden_states.shape[:-2].numel()
    x = hidden_states.reshape(num_tokens, num_streams, hidden).contiguous()
    if v is None:
        kv = k.reshape(num_tokens, num_streams + 1, hidden).contiguous()
        return x, kv[:, :-1], kv[:, -1], kv
    key, value = k.reshape(num_tokens, num_streams, hidden), v.reshape(num_tokens, hidden)
    return x, _dense_in_last(key), _dense_in_last(value), None


def _dense_in_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _weight_gradients(
    partial: Tensor,
    weights: tuple[Tensor, Tensor],
    owners: tuple[Tensor, Tensor],
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of the weights that need one and have no `main_grad` to add it to."""
    targets = [
        _main_grad(name, owner) if need else None
        for name, owner, need in zip(_WEIGHTS, owners, needed)
    ]
    # One weight for both norms has one `main_grad`, which cannot take two sums at the same time.
    shared = _overlap(*targets)
    sums = [
        partial.new_zeros(partial.shape[1:]) if target is None or shared else target
        for target in targets
    ]
    ops.grad_w_reduce(partial, *weights, *sums)
    if shared:
        for target, total in zip(targets, sums):
            if target is not None:
                target.add_(total)
    return tuple(
        total if need and target is None else None
        for total, target, need in zip(sums, targets, needed)
    )


def _overlap(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two packed buffers of one shape share memory."""
    if one is None or other is None:
        return False
    return abs(one.data_ptr() - other.data_ptr()) < one.nbytes


def _main_grad(name: str, weight: Tensor) -> Tensor | None:
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    if not isinstance(main_grad, Tensor):
        raise TypeError(
            f"engram_gate: main_grad of {name} must be a tensor, got {type(main_grad).__name__}"
        )
    fits = main_grad.shape == weight.shape and main_grad.dtype == torch.float32
    if not (fits and main_grad.is_contiguous()):
        raise ValueError(
            f"engram_gate: main_grad of {name} must be packed float32 {list(weight.shape)}, got "
            f"{main_grad.dtype} {list(main_grad.shape)} with strides {main_grad.stride()}"
        )
    return main_grad
