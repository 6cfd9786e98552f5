"""References of the next residual and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.mhc.arithmetic import dot, rounded, weighted
from tile_kernels.runtime.arithmetic import widened


def mhc_post_ref(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor
) -> Tensor:
    """Computes the next residual from the output of a sublayer.

    Args:
        x: `[..., h]`: the output of the sublayer.
        residual: `[..., m, h]`.
        post_layer_mix: `[..., m, 1]`.
        comb_res_mix: `[..., m, m]`.

    Returns:
        `[..., m, h]`, bfloat16.

    Example:
        >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> comb = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> mhc_post_ref(x, residual, torch.tensor([[1.0], [0.5]]), comb).tolist()
        [[12.25, 23.5], [6.75, 12.5]]
    """
    mixed = torch.einsum("...mn,...mc->...nc", comb_res_mix, residual.float())
    return (x.float().unsqueeze(-2) * post_layer_mix + mixed).bfloat16()


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """`post[j] * x + sum_i comb[i, j] * residual[i]`: the product first, then streams in order.

    >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> comb = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> mhc_post(x, residual, torch.tensor([[1.0], [0.5]]), comb).tolist()
    [[12.25, 23.5], [6.75, 12.5]]
    """
    streams = residual.unbind(-2)
    written = []
    for j, weight in enumerate(post_layer_mix.squeeze(-1).unbind(-1)):
        start = widened(x) * widened(weight).unsqueeze(-1)
        total = weighted(comb_res_mix[..., j].unbind(-1), streams, start)
        written.append(rounded(total, residual.dtype))
    return torch.stack(written, -2)


def mhc_post_bwd(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all four inputs of `mhc_post`.

    >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> [g.tolist() for g in mhc_post_bwd(x, residual, post, comb, torch.eye(2))[:2]]
    [[1.0, 0.5], [[0.75, 0.25], [0.5, 0.5]]]
    """
    zero = x.new_zeros((), dtype=widened(x).dtype)
    grads = d_o.unbind(-2)
    post = post_layer_mix.squeeze(-1).unbind(-1)
    d_x = rounded(weighted(post, grads, zero), x.dtype)
    d_residual = torch.empty_like(residual, memory_format=torch.contiguous_format)
    d_post = torch.empty_like(post_layer_mix, memory_format=torch.contiguous_format)
    d_comb = torch.empty_like(comb_res_mix, memory_format=torch.contiguous_format)
    for i, stream in enumerate(residual.unbind(-2)):
        total = weighted(comb_res_mix[..., i, :].unbind(-1), grads, zero)
        d_residual[..., i, :] = rounded(total, residual.dtype)
        d_post[..., i, 0] = dot(x, grads[i], d_post.dtype)
        for j, grad in enumerate(grads):
            d_comb[..., i, j] = dot(stream, grad, d_comb.dtype)
    return d_x, d_residual, d_post, d_comb
