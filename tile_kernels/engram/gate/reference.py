"""References of the gate that adds what the hash of n-grams looks up.

With `T` tokens, `hc` residual streams and hidden size `H`, the gate compares a stream `x` with its
key `k`, both after RMSNorm, whose weights `w` are the product of the two norms' weights:

    dot    = sum_d x_d w_d k_d              rstd_x = rsqrt(mean_d x_d^2 + eps), rstd_k likewise
    s      = dot rstd_x rstd_k / sqrt(H)
    gate   = sigmoid(sign(s) sqrt(max(|s|, clamp)))
    output = x + gate v

It is computed in float32, and in float64 where the input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import widened


def engram_gate_ref(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gate from its definition, differentiable by autograd.

    Note the order: `clamp_value`, `eps`.

    Args:
        hidden_states: `[*, hc, H]`, bfloat16 or any floating-point dtype.
        k: `[*, hc, H]`, dtype of `hidden_states`.
        v: `[*, H]`, dtype of `hidden_states`.
        weight_hidden: `[hc, H]`, any floating-point dtype.
        weight_embed: `[hc, H]`, any floating-point dtype.
        clamp_value: The least absolute value under the square root.
        eps: The epsilon of the norms.
        save_for_backward: Whether intermediate results are returned as well.

    Returns:
        `[*, hc, H]`; with `save_for_backward` also `dot`, `gate_score`, `rstd_x` and `rstd_k`,
        float32 `[*, hc]`.

    Example:
        >>> x, v = torch.zeros(1, 1, 4), torch.ones(1, 4)
        >>> engram_gate_ref(x, x, v, torch.ones(1, 4), torch.ones(1, 4), 1e-6, 1e-20)
        tensor([[[0.5000, 0.5000, 0.5000, 0.5000]]])
    """
    x, key = widened(hidden_states), widened(k)
    dot = ((x * widened(weight_hidden)) * (key * widened(weight_embed))).sum(-1)
    rstd_x, rstd_k = rstd(x, eps), rstd(key, eps)
    gate_score = gate_of(dot, rstd_x, rstd_k, clamp_value, x.shape[-1])
    output = (x + gate_score[..., None] * widened(v)[..., None, :]).to(hidden_states.dtype)
    return (output, dot, gate_score, rstd_x, rstd_k) if save_for_backward else output


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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gated value added to each stream, and what the gradient needs. `eps` comes first.

    | argument | shape | dtype |
    |---|---|---|
    | `hidden_states`, `k` | `[T, hc, H]` | bfloat16 |
    | `v` | `[T, H]` | bfloat16 |
    | `weight_fused` | `[hc, H]`, of `fused_weight` | float32 |
    | returns `output` | `[T, hc, H]` | bfloat16 |
    | returns `dot`, `gate_score`, `rstd_x`, `rstd_k` | `[T, hc]`, or None | float32 |

    With `add_residual=False` the output is `gate * v`. Where `s` is 0 the gate is one half. Image
    tokens (mask `[T]`, bool) have no value, and saved numbers of 0. `inplace` writes the output to
    `hidden_states`.

    >>> x, v = torch.ones(1, 1, 4), torch.ones(1, 4)
    >>> engram_gate_fwd(x, x, v, torch.ones(1, 4), 0.0, 1e-6)
    (tensor([[[1.8044, 1.8044, 1.8044, 1.8044]]]), tensor([[4.]]), tensor([[0.8044]]),
     tensor([[1.]]), tensor([[1.]]))
    """
    x, key = widened(hidden_states), widened(k)
    dot = (x * weight_fused * key).sum(-1)
    rstd_x, rstd_k = rstd(x, eps), rstd(key, eps)
    gate_score = gate_of(dot, rstd_x, rstd_k, clamp_value, x.shape[-1])
    gated = gate_score[..., None] * widened(v)[..., None, :]
    output = (x + gated if add_residual else gated).to(hidden_states.dtype)
    saved = [dot, gate_score, rstd_x, rstd_k]
    if image_token_mask is not None:
        passed = hidden_states if add_residual else torch.zeros_like(output)
        output = torch.where(image_token_mask[:, None, None], passed, output)
        saved = [each.masked_fill(image_token_mask[:, None], 0) for each in saved]
    if inplace:
        output = hidden_states.copy_(output)
    if not save_for_backward:
        return output, None, None, None, None
    return output, saved[0], saved[1], saved[2], saved[3]


def engram_gate_packed_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`engram_gate_fwd` with the keys of all streams and then the value in `kv` `[T, hc + 1, H]`.

    >>> x, kv = torch.ones(1, 1, 4), torch.ones(1, 2, 4)
    >>> engram_gate_packed_fwd(x, kv, torch.ones(1, 4), 0.0, 1e-6, False)[0]
    tensor([[[1.8044, 1.8044, 1.8044, 1.8044]]])
    """
    return engram_gate_fwd(
        hidden_states, kv[:, :-1], kv[:, -1], weight_fused, eps, clamp_value, save_for_backward,
        image_token_mask=image_token_mask, inplace=inplace,
    )  # fmt: skip


@torch.no_grad()
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
    num_parts: int,
    add_residual: bool = True,
    image_token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the gate; that of the fused weight in `num_parts` sums.

    With `G = sum_d grad_out_d v_d`, the gradient of `dot` is

        D = G gate (1 - gate) / 2 sqrt(rstd_x rstd_k / (sqrt(H) |dot|))

    and 0 where `dot` is 0 or `|s| < clamp_value`. With it

        grad_x = grad_out + D (k w - x dot rstd_x^2 / H)      grad_v = sum_h grad_out_h gate_h
        grad_k =            D (x w - k dot rstd_k^2 / H)      grad_w = sum_t D x k

    `grad_v` adds the streams in order. Part `p` of `grad_w` is the sum over the tokens from
    `p * T // num_parts` on, up to the next such number. Without the residual `grad_x` has no
    `grad_out`. Image tokens have no other gradient than that of the residual.

    Args:
        num_parts: The number of partial sums of the gradient of the fused weight; the operator
            chooses it.

    Returns:
        `grad_hidden_states`, `grad_k` `[T, hc, H]` and `grad_v` `[T, H]`, bfloat16; and
        `grad_w_partial` `[num_parts, hc, H]`, float32.

    Example:
        >>> one = torch.ones(1, 1)
        >>> x = one[None]
        >>> engram_gate_bwd(x, x, x, one, one, one, 0.75 * one, one, one, 0.0, num_parts=2)
        (tensor([[[1.]]]), tensor([[[0.]]]), tensor([[0.7500]]), tensor([[[0.0000]], [[0.0938]]]))
    """
    x, key, value, grad = (widened(tensor) for tensor in (hidden_states, k, v, grad_out))
    num_tokens, num_streams, hidden = x.shape
    scale = hidden**-0.5

    into_gate = (grad * value[:, None]).sum(-1)
    slope = gate_score * (1 - gate_score) * 0.5 * (scale * rstd_x * rstd_k / dot.abs()).sqrt()
    flat = (dot.abs() * scale * rstd_x * rstd_k < clamp_value) | (dot == 0)
    grad_dot = torch.where(flat, 0.0, into_gate * slope)[..., None]

    along_x, along_k = (
        (dot * rstd * rstd / hidden)[..., None] * tensor
        for rstd, tensor in ((rstd_x, x), (rstd_k, key))
    )
    grad_x = grad_dot * (key * weight_fused - along_x)
    if add_residual:
        grad_x = grad + grad_x
    grad_k = grad_dot * (x * weight_fused - along_k)
    grad_v = torch.zeros_like(value)
    for stream in range(num_streams):
        grad_v = grad_v + grad[:, stream] * gate_score[:, stream, None]

    starts = torch.arange(1, num_parts, device=x.device) * num_tokens // num_parts
    part = torch.bucketize(torch.arange(num_tokens, device=x.device), starts, right=True)
    token_products = grad_dot * x * key
    if image_token_mask is not None:
        image = image_token_mask[:, None, None]
        grad_x = torch.where(image, grad if add_residual else torch.zeros_like(grad), grad_x)
        grad_k, token_products = (y.masked_fill(image, 0) for y in (grad_k, token_products))
        grad_v = grad_v.masked_fill(image_token_mask[:, None], 0)
    grad_w_partial = x.new_zeros(num_parts, num_streams, hidden).index_add(0, part, token_products)
    return (
        grad_x.to(hidden_states.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_w_partial,
    )  # fmt: skip


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
    num_parts: int,
    image_token_mask: Tensor | None = None,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`engram_gate_bwd` with keys and value, and their gradients, in one tensor.

    Args:
        num_parts: As in `engram_gate_bwd`.

    Example:
        >>> one = torch.ones(1, 1)
        >>> x, kv, gate = one[None], torch.ones(1, 2, 1), 0.75 * one
        >>> engram_gate_packed_bwd(x, x, kv, one, one, gate, one, one, 0.0, num_parts=1)[1].tolist()
        [[[0.0], [0.75]]]
    """
    grad_x, grad_k, grad_v, partial = engram_gate_bwd(
        grad_out, hidden_states, kv[:, :-1], kv[:, -1], weight_fused, dot, gate_score, rstd_x,
        rstd_k, clamp_value, num_parts, add_residual, image_token_mask,
    )  # fmt: skip
    return grad_x, torch.cat((grad_k, grad_v[:, None]), 1), partial


def gate_of(dot: Tensor, rstd_x: Tensor, rstd_k: Tensor, clamp_value: float, hidden: int) -> Tensor:
    """The gate from the raw dot product and the two norms.

    >>> one = torch.ones(3)
    >>> gate_of(torch.tensor([-4.0, 0.0, 4.0]), one, one, 1e-6, 16)
    tensor([0.2689, 0.5000, 0.7311])
    """
    s = dot * rstd_x * rstd_k * hidden**-0.5
    return torch.sigmoid(s.abs().clamp(min=clamp_value).sqrt() * s.sign())


def rstd(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` along the last dimension.

    >>> rstd(torch.tensor([[1.0, 7.0]]), 0.0)
    tensor([0.2000])
    """
    return torch.rsqrt(x.square().mean(-1) + eps)
