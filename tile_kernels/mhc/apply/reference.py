"""References of the weighted sum of the streams and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.mhc.arithmetic import dot, fma, rounded, weighted
from tile_kernels.runtime.arithmetic import widened


def mhc_pre_apply_mix_ref(x: Tensor, mix: Tensor) -> Tensor:
    """Computes the weighted sum of the streams.

    Args:
        x: `[..., m, h]`.
        mix: `[..., m, 1]`.

    Returns:
        `[..., h]`, bfloat16.

    Example:
        >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
        >>> mhc_pre_apply_mix_ref(x, mix).tolist()
        [1.75, 2.5]
    """
    return (x * mix).sum(-2).bfloat16()


def mhc_pre_apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The sum of the streams of `x` `[..., m, h]`, weighted by `mix` `[..., m, 1]`, in order.

    >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
    >>> mhc_pre_apply_mix(x, mix).tolist()
    [1.75, 2.5]
    """
    start = x.new_zeros((), dtype=widened(x).dtype)
    return rounded(weighted(mix.squeeze(-1).unbind(-1), x.unbind(-2), start), x.dtype)


def mhc_pre_apply_mix_bwd(
    grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and `mix`; the former is added to `grad_x`, in place, where given.

    >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
    >>> mhc_pre_apply_mix_bwd(torch.tensor([1.0, 2.0]), x, mix)[1].tolist()
    [[5.0], [11.0]]
    """
    grad = widened(grad_out)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if grad_x is None else grad_x
    grad_mix = torch.empty_like(mix, memory_format=torch.contiguous_format)
    for i, weight in enumerate(widened(mix).unbind(-2)):
        term = grad * weight if grad_x is None else fma(grad, weight, widened(out[..., i, :]))
        out[..., i, :] = rounded(term, x.dtype)
        grad_mix[..., i, 0] = dot(grad, x[..., i, :], mix.dtype)
    return out, grad_mix
