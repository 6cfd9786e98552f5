"""Oracles of manifold-constrained hyper-connections (mHC).

The residual of a token is `m` streams of `h` columns. Mixes say how a sublayer reads them (`pre`),
how its output is written back (`post`), and how they mix (`comb`, from stream `i` to stream `j`):

    layer_input = sum_i pre[i] * residual[i]
    residual'[j] = post[j] * output + sum_i comb[i, j] * residual[i]

`*_ref` are formulas in plain PyTorch, differentiable. The functions without that ending define the
operators: they fix the order of sums, with one fused multiply-add per term, and have the gradients
written out. All compute in float32, or in float64 if that is what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.torch.arithmetic import fused_multiply_add

# ---- references ---------------------------------------------------------------------------------


def expand_to_mhc_ref(hidden: Tensor, mhc_mult: int) -> Tensor:
    """`[..., h]` to contiguous `[..., m, h]`: every stream a copy.

    >>> expand_to_mhc_ref(torch.tensor([1, 2]), 2).tolist()
    [[1, 2], [1, 2]]
    """
    return hidden.unsqueeze(-2).repeat(*(1,) * (hidden.dim() - 1), mhc_mult, 1)


def sinkhorn_normalize_ref(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """`[..., M, M]` logits to nearly doubly stochastic matrices.

    `softmax` of rows plus `eps`, columns over their sums, then `repeat - 1` times rows and columns;
    `eps` is added to every sum.

    >>> sinkhorn_normalize_ref(torch.zeros(2, 2), 1)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    y = x.softmax(-1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


def mhc_head_compute_mix_ref(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """`sigmoid(input_mix * scale + base) + eps` for `[..., m]`, scale `[1]` and base `[m]`.

    >>> one = torch.ones(1)
    >>> mhc_head_compute_mix_ref(torch.tensor([0.0, 1.0]), 2 * one, torch.tensor([0.0, -2.0]), 0.01)
    tensor([0.5100, 0.5100])
    """
    return torch.sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps


def mhc_pre_split_mixes_ref(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`[..., m * (m + 2)]` mixes to `pre`, `post` `[..., m, 1]` and the logits `[..., m, m]`.

    >>> one = torch.ones(3)
    >>> pre, post, comb = mhc_pre_split_mixes_ref(torch.zeros(1, 1, 3), one, one, 1, 2.0, 0.0)
    >>> pre.item(), post.item(), comb.item()
    (0.7310585975646973, 1.4621171951293945, 1.0)
    """
    sizes = (mhc_mult, mhc_mult, mhc_mult * mhc_mult)
    scale = mhc_scale.repeat_interleave(torch.tensor(sizes, device=mhc_scale.device))
    pre, post, comb = (input_mixes * scale + mhc_base).split(sizes, dim=-1)
    return (
        (torch.sigmoid(pre) + mhc_pre_eps).unsqueeze(-1),
        (torch.sigmoid(post) * mhc_post_mult_value).unsqueeze(-1),
        comb.unflatten(-1, (mhc_mult, mhc_mult)),
    )


def mhc_pre_apply_mix_ref(x: Tensor, mix: Tensor) -> Tensor:
    """The sum of the streams `[..., m, h]`, weighted by `[..., m, 1]`: bfloat16 `[..., h]`.

    >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
    >>> mhc_pre_apply_mix_ref(x, mix).tolist()
    [1.75, 2.5]
    """
    return (x * mix).sum(-2).bfloat16()


def mhc_post_ref(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor
) -> Tensor:
    """The next residual, bfloat16 `[..., m, h]`, from the sublayer's output `x` `[..., h]`.

    >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> comb = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> mhc_post_ref(x, residual, torch.tensor([[1.0], [0.5]]), comb).tolist()
    [[12.25, 23.5], [6.75, 12.5]]
    """
    mixed = torch.einsum("...mn,...mc->...nc", comb_res_mix, residual.float())
    return (x.float().unsqueeze(-2) * post_layer_mix + mixed).bfloat16()


def mhc_pre_norm_fn_ref(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, mhc_norm_eps: float
) -> Tensor:
    """The mixes `[..., J]` of a residual `[..., m, h]`: a projection of its RMS norm.

    `mhc_fn` is float32 `[J, m * h]`, `mhc_norm_weight` `[m * h]` or None. The norm is applied after
    the product, which is a matrix product of PyTorch's, with TF32 if that is on.

    >>> rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    >>> mhc_pre_norm_fn_ref(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rows, None, 1e-6)
    tensor([0.3651, 1.8257])
    """
    if mhc_fn.dtype != torch.float32:
        raise TypeError(f"mhc_fn must be float32, got {mhc_fn.dtype}")
    if mhc_norm_weight is not None:
        mhc_fn = mhc_fn * mhc_norm_weight
    x = residual.flatten(-2).float()
    mean_square = x.square().mean(-1, keepdim=True)
    return torch.nn.functional.linear(x, mhc_fn) * torch.rsqrt(mean_square + mhc_norm_eps)


# ---- arithmetic ---------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c`, rounded once in float32."""
    if torch.float64 in (a.dtype, b.dtype, c.dtype):
        return a * b + c
    return fused_multiply_add(a, b, c)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; a bfloat16 NaN is the one that conversions on a GPU return."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return x.bfloat16().view(torch.int16).masked_fill(x.isnan(), 0x7FFF).view(dtype)


def _weighted(weights: Sequence[Tensor], rows: Sequence[Tensor], total: Tensor) -> Tensor:
    """`total + sum_i weights[i] * rows[i]`, in order; weights `[...]`, rows `[..., h]`."""
    for weight, row in zip(weights, rows):
        total = _fma(_wide(row), _wide(weight).unsqueeze(-1), total)
    return total


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of products over the last dimension, rounded once."""
    return (a.double() * b.double()).sum(-1).to(dtype)


def _tree_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, neighbours first, then neighbouring sums; `dim` is kept."""
    parts = list(x.split(1, dim))
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])] + odd
    return parts[0]


def _sigmoid(z: Tensor) -> Tensor:
    return torch.ones_like(z) / (1 + torch.exp(-z))


# ---- streams ------------------------------------------------------------------------------------


def expand_to_mhc(hidden: Tensor, mhc_mult: int) -> Tensor:
    """`expand_to_mhc_ref`.

    >>> expand_to_mhc(torch.tensor([1, 2]), 2).tolist()
    [[1, 2], [1, 2]]
    """
    return expand_to_mhc_ref(hidden, mhc_mult)


def expand_to_mhc_bwd(grad_out: Tensor) -> Tensor:
    """The sum of the streams `[..., m, h]`, in order: `[..., h]`.

    >>> expand_to_mhc_bwd(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
    [5.0, 7.0, 9.0]
    """
    first, *others = grad_out.unbind(-2)
    total = _wide(first)
    for stream in others:
        total = total + _wide(stream)
    return _rounded(total, grad_out.dtype)


def mhc_pre_apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The sum of the streams of `x` `[..., m, h]`, weighted by `mix` `[..., m, 1]`, in order.

    >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
    >>> mhc_pre_apply_mix(x, mix).tolist()
    [1.75, 2.5]
    """
    start = x.new_zeros((), dtype=_wide(x).dtype)
    return _rounded(_weighted(mix.squeeze(-1).unbind(-1), x.unbind(-2), start), x.dtype)


def mhc_pre_apply_mix_bwd(
    grad_out: Tensor, x: Tensor, mix: Tensor, grad_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and `mix`; the former is added to `grad_x`, in place, where given.

    >>> x, mix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.25], [0.5]])
    >>> mhc_pre_apply_mix_bwd(torch.tensor([1.0, 2.0]), x, mix)[1].tolist()
    [[5.0], [11.0]]
    """
    grad = _wide(grad_out)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if grad_x is None else grad_x
    grad_mix = torch.empty_like(mix, memory_format=torch.contiguous_format)
    for i, weight in enumerate(_wide(mix).unbind(-2)):
        term = grad * weight if grad_x is None else _fma(grad, weight, _wide(out[..., i, :]))
        out[..., i, :] = _rounded(term, x.dtype)
        grad_mix[..., i, 0] = _dot(grad, x[..., i, :], mix.dtype)
    return out, grad_mix


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
        start = _wide(x) * _wide(weight).unsqueeze(-1)
        total = _weighted(comb_res_mix[..., j].unbind(-1), streams, start)
        written.append(_rounded(total, residual.dtype))
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
    zero = x.new_zeros((), dtype=_wide(x).dtype)
    grads = d_o.unbind(-2)
    post = post_layer_mix.squeeze(-1).unbind(-1)
    d_x = _rounded(_weighted(post, grads, zero), x.dtype)
    d_residual = torch.empty_like(residual, memory_format=torch.contiguous_format)
    d_post = torch.empty_like(post_layer_mix, memory_format=torch.contiguous_format)
    d_comb = torch.empty_like(comb_res_mix, memory_format=torch.contiguous_format)
    for i, stream in enumerate(residual.unbind(-2)):
        total = _weighted(comb_res_mix[..., i, :].unbind(-1), grads, zero)
        d_residual[..., i, :] = _rounded(total, residual.dtype)
        d_post[..., i, 0] = _dot(x, grads[i], d_post.dtype)
        for j, grad in enumerate(grads):
            d_comb[..., i, j] = _dot(stream, grad, d_comb.dtype)
    return d_x, d_residual, d_post, d_comb


# ---- mixes --------------------------------------------------------------------------------------


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
    pre, post, comb = (
        _fma(x, scale, base)
        for x, scale, base in zip(input_mixes.split(sizes, -1), mhc_scale, mhc_base.split(sizes))
    )
    return (
        (_sigmoid(pre) + mhc_pre_eps).unsqueeze(-1),
        (_sigmoid(post) * mhc_post_mult_value).unsqueeze(-1),
        comb.unflatten(-1, (mhc_mult, mhc_mult)),
    )


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
    grad_scale = torch.stack([of_scale for of_scale, _ in sums])
    return grad_mixes, grad_scale, torch.cat([of_base for _, of_base in sums])


def _slope(x: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """The derivative of the sigmoid at `x * scale + base`."""
    p = _sigmoid(_fma(x, scale, base))
    return p * (1 - p)


def _sums(dz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """`dz * x` over everything, and `dz` over the tokens, rounded once."""
    dims = tuple(range(dz.dim() - 1))
    wide = dz.double()
    of_base = wide.sum(dims) if dims else wide
    return (wide * x.double()).sum().to(dz.dtype), of_base.to(dz.dtype)


def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """As `mhc_head_compute_mix_ref`, with one rounding in `x * scale + base`.

    >>> one = torch.ones(1)
    >>> mhc_head_compute_mix(torch.tensor([0.0, 1.0]), 2 * one, torch.tensor([0.0, -2.0]), 0.01)
    tensor([0.5100, 0.5100])
    """
    return _sigmoid(_fma(input_mix, mhc_scale, mhc_base)) + mhc_pre_eps


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


# ---- Sinkhorn -----------------------------------------------------------------------------------


def _softmax(x: Tensor) -> Tensor:
    exponentials = torch.exp(x - x.amax(-1, keepdim=True))
    return exponentials / _tree_sum(exponentials, -1)


def _steps(y: Tensor, repeat: int, eps: float) -> list[tuple[int, Tensor, Tensor]]:
    """Every normalisation: its dimension, its divisor and its result."""
    steps = []
    for dim in [-2, *[-1, -2] * (repeat - 1)]:
        divisor = _tree_sum(y, dim) + eps
        y = y / divisor
        steps.append((dim, divisor, y))
    return steps


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """As `sinkhorn_normalize_ref`, with sums of neighbours first.

    >>> sinkhorn_normalize(torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), 2)
    tensor([[0.3636, 0.6316],
            [0.6364, 0.3684]])
    """
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _steps(_softmax(x) + eps, repeat, eps)[-1][2].contiguous()


def sinkhorn_normalize_bwd(
    grad_out: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6
) -> Tensor:
    """The gradient of the logits; every step is computed again.

    A step `y' = y / d` with `d = sum(y) + eps` has the gradient `(g - sum(g * y')) / d`, the
    softmax `p` has `(g - sum(g * p)) * p`.

    >>> x, grad = torch.tensor([[0.0, 1.0986123], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0, 0]])
    >>> sinkhorn_normalize_bwd(grad, x, 2)
    tensor([[ 0.1240, -0.1240],
            [-0.1198,  0.1198]])
    """
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    p = _softmax(x)
    grad = grad_out
    for dim, divisor, y in reversed(_steps(p + eps, repeat, eps)):
        grad = (grad - _tree_sum(grad * y, dim)) / divisor
    return ((grad - _tree_sum(grad * p, -1)) * p).contiguous()
