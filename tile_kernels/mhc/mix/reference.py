"""References of the mixes and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tile_kernels.mhc.arithmetic import fma


def mhc_pre_split_mixes_ref(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits mixes into `pre`, `post` and the logits of `comb`.

    Args:
        input_mixes: `[..., m * (m + 2)]`.
        mhc_scale: `[3]`.
        mhc_base: `[m * (m + 2)]`.
        mhc_mult: The number of streams `m`.
        mhc_post_mult_value: The factor of the sigmoid of `post`.
        mhc_pre_eps: A number that is added to `pre`.

    Returns:
        `pre` and `post` `[..., m, 1]`, and logits `[..., m, m]`.

    Example:
        >>> one = torch.ones(3)
        >>> pre, post, comb = mhc_pre_split_mixes_ref(torch.zeros(1, 1, 3), one, one, 1, 2.0, 0.0)
        >>> pre.item(), post.item(), comb.item()
        (0.7310585975646973, 1.4621171951293945, 1.0)
    """
    sizes = (mhc_mult, mhc_mult, mhc_mult * mhc_mult)
    scale = mhc_scale.repeat_interleave(torch.tensor(sizes, device=mhc_scale.device))
    shifted = (input_mixes * scale + mhc_base).split(sizes, dim=-1)
    return _mixes(shifted, torch.sigmoid, mhc_post_mult_value, mhc_pre_eps)


def mhc_head_compute_mix_ref(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """Computes `sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps`.

    Args:
        input_mix: `[..., m]`.
        mhc_scale: `[1]`.
        mhc_base: `[m]`.
        mhc_pre_eps: A number that is added.

    Returns:
        `[..., m]`.

    Example:
        >>> scale, base = torch.tensor([2.0]), torch.tensor([0.0, -2.0])
        >>> mhc_head_compute_mix_ref(torch.tensor([0.0, 1.0]), scale, base, 0.01)
        tensor([0.5100, 0.5100])
    """
    return torch.sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `mhc_pre_split_mixes_ref`, with one rounding in `x * scale + base`.

    >>> one = torch.ones(3)
    >>> mhc_pre_split_mixes(torch.zeros(1, 3), one, one, 1, 2.0, 0.0)[2].item()
    1.0
    """
    sizes = (mhc_mult, mhc_mult, mhc_mult * mhc_mult)
    shifted = [
        fma(x, scale, base)
        for x, scale, base in zip(input_mixes.split(sizes, -1), mhc_scale, mhc_base.split(sizes))
    ]
    return _mixes(shifted, _sigmoid, mhc_post_mult_value, mhc_pre_eps)


def mhc_pre_split_mixes_bwd(
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_post_mult_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `input_mixes`, `mhc_scale` and `mhc_base`.

    With `p` the sigmoid: `dz = g * p * (1 - p)`, for `post` times the multiplier, for `comb` `g`.

    >>> one = torch.ones(3)
    >>> grads = [torch.ones(1, 1, 1)] * 3
    >>> mhc_pre_split_mixes_bwd(*grads, torch.zeros(1, 3), one, 0 * one, 2.0)[2].tolist()
    [0.25, 0.5, 1.0]
    """
    m = grad_comb.shape[-1]
    sizes = (m, m, m * m)
    pre, post, comb = input_mixes.split(sizes, -1)
    base_pre, base_post, _ = mhc_base.split(sizes)
    parts = [
        _slope(pre, mhc_scale[0], base_pre) * grad_pre.squeeze(-1),
        _slope(post, mhc_scale[1], base_post) * (grad_post.squeeze(-1) * mhc_post_mult_value),
        grad_comb.flatten(-2),
    ]
    grad_mixes = torch.cat([dz * scale for dz, scale in zip(parts, mhc_scale)], -1)
    sums = [_sums(dz, x) for dz, x in zip(parts, (pre, post, comb))]
    grad_scale = torch.stack([scale_grad for scale_grad, _ in sums])
    return grad_mixes, grad_scale, torch.cat([base_grad for _, base_grad in sums])


def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """As `mhc_head_compute_mix_ref`, with one rounding in `x * scale + base`.

    >>> one = torch.ones(1)
    >>> mhc_head_compute_mix(torch.tensor([0.0, 1.0]), 2 * one, torch.tensor([0.0, -2.0]), 0.01)
    tensor([0.5100, 0.5100])
    """
    return _sigmoid(fma(input_mix, mhc_scale, mhc_base)) + mhc_pre_eps


def mhc_head_compute_mix_bwd(
    grad_mix: Tensor, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `input_mix`, `mhc_scale` and `mhc_base`.

    >>> x, one = torch.tensor([[0.0, 1.0]]), torch.ones(1)
    >>> mhc_head_compute_mix_bwd(torch.ones(1, 2), x, 2 * one, torch.tensor([0.0, -2.0]))
    (tensor([[0.5000, 0.5000]]), tensor([0.2500]), tensor([0.2500, 0.2500]))
    """
    dz = _slope(input_mix, mhc_scale, mhc_base) * grad_mix
    grad_scale, grad_base = _sums(dz, input_mix)
    return dz * mhc_scale, grad_scale.unsqueeze(0), grad_base


def _mixes(
    shifted: Sequence[Tensor], sigmoid: Callable[[Tensor], Tensor], post_mult: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`pre`, `post` and `comb` of projections that are scaled and shifted."""
    pre, post, comb = shifted
    m = pre.shape[-1]
    return (
        (sigmoid(pre) + eps).unsqueeze(-1),
        (sigmoid(post) * post_mult).unsqueeze(-1),
        comb.unflatten(-1, (m, m)),
    )


def _sigmoid(z: Tensor) -> Tensor:
    return torch.ones_like(z) / (1 + torch.exp(-z))


def _slope(x: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """The derivative of the sigmoid at `x * scale + base`."""
    p = _sigmoid(fma(x, scale, base))
    return p * (1 - p)


def _sums(dz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """`dz * x` over everything, and `dz` over the tokens, rounded once."""
    dims = tuple(range(dz.dim() - 1))
    wide = dz.double()
    base_grad = wide.sum(dims) if dims else wide
    return (wide * x.double()).sum().to(dz.dtype), base_grad.to(dz.dtype)
