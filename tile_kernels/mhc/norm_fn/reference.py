"""References of the projection that gives the mixes of a token, and of its gradient.

The streams of a token, as one row `X` of `K = m * h` numbers, are projected to `J` mixes and
divided by their root mean square:

    mul = X . f^T          s = sum of X^2          mixes = mul * r,  r = 1 / sqrt(s / K + eps)

`f` is the weight rounded to TF32 (10 bits after the leading one, to nearest, ties away from zero),
and so is the gradient of `mul` in the backward pass. Sums are in float32, or float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import widened

_DROPPED = 0x1FFF  # the bits of a float32 that TF32 has not


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 whose upper 19 bits are `x` in TF32, to nearest, ties away; the others are left over.

    For matrix units, which ignore them. See `tf32` for numbers to compute with.

    >>> round_to_tf32(torch.tensor([1.0])).view(torch.int32).item() == 0x3F801000
    True
    """
    return (x.contiguous().view(torch.int32) + 0x1000).view(torch.float32)


def tf32(x: Tensor) -> Tensor:
    """`x` rounded to TF32, to nearest, ties away from zero; float64 stays as it is.

    >>> tf32(torch.tensor([0.1, 1 + 2**-11, 1 + 2**-11 - 2**-23])).tolist()
    [0.0999755859375, 1.0009765625, 1.0]
    """
    if x.dtype == torch.float64:
        return x
    bits = round_to_tf32(x).view(torch.int32) & ~_DROPPED
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def mhc_pre_norm_fn_ref(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, mhc_norm_eps: float
) -> Tensor:
    """Projects the RMS norm of a residual.

    The norm is applied after the product, which is a matrix product of PyTorch, with TF32 if that
    is enabled.

    Args:
        residual: `[..., m, h]`.
        mhc_fn: `[J, m * h]`, float32.
        mhc_norm_weight: `[m * h]`, or None.
        mhc_norm_eps: The epsilon of the norm.

    Returns:
        The mixes, `[..., J]`.

    Example:
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


def mhc_norm_fn_fwd(residual: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mixes of each token; with them `mul` and `s`, which a gradient needs.

    | argument | shape | dtype |
    |---|---|---|
    | `residual` | `[*, m, h]` | bfloat16 |
    | `fn` | `[J, m * h]` | float32 |
    | returns `mixes`, `mul` | `[*, J]` | float32 |
    | returns `s` | `[*]` | float32 |

    >>> x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> mixes, _, s = mhc_norm_fn_fwd(x, torch.eye(4)[:1], 0.0)
    >>> mixes, s
    (tensor([[0.3651]]), tensor([30.]))
    """
    x = _rows(residual)
    mul = x @ tf32(fn).to(x.dtype).T
    s = x.square().sum(-1)
    return mul * torch.rsqrt(s / x.shape[-1] + eps)[..., None], mul, s


@torch.no_grad()
def mhc_norm_fn_bwd(
    grad_mixes: Tensor,
    residual: Tensor,
    fn: Tensor,
    mul: Tensor,
    s: Tensor,
    eps: float,
    grad_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `residual`, added to `grad_residual` if that is given, and of `fn`.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_mixes` | `[*, J]` | float32 |
    | `residual`, `fn`, `mul`, `s` | those of `mhc_norm_fn_fwd` | |
    | `grad_residual`, optional | `[*, m, h]`, written | bfloat16 |
    | returns `grad_residual` | `[*, m, h]` | that of `residual` |
    | returns `grad_fn` | `[J, m * h]` | float32 |

    With `g` the gradient of the mixes,

        gm = tf32(g r)      gs = - (sum of g mul) r / (2 (s + eps K))
        grad_residual = gm . f + 2 X gs        grad_fn = gm^T . X

    >>> x, fn = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.eye(4)[:1]
    >>> mixes, mul, s = mhc_norm_fn_fwd(x, fn, 0.0)
    >>> mhc_norm_fn_bwd(torch.ones(1, 1), x, fn, mul, s, 0.0)[1]
    tensor([[0.3652, 0.7305, 1.0957, 1.4609]])
    """
    x = _rows(residual)
    size = x.shape[-1]
    # A step of this number moves `gm` across ties of TF32: rounded once, from float64.
    r = torch.rsqrt(s.double() / size + torch.full_like(s, eps).double()).to(s.dtype)
    into_norm = -0.5 * (grad_mixes * mul).sum(-1) * r / (s + eps * size)
    into_product = tf32(grad_mixes * r[..., None])
    grad = into_product @ tf32(fn).to(x.dtype) + 2 * x * into_norm[..., None]
    grad_fn = into_product.reshape(-1, fn.shape[0]).T @ x.reshape(-1, size)
    grad = grad.view(residual.shape)
    if grad_residual is None:
        return grad.to(residual.dtype), grad_fn
    grad_residual.copy_(grad_residual.to(grad.dtype) + grad)
    return grad_residual, grad_fn


def _rows(residual: Tensor) -> Tensor:
    """`[*, m * h]` in float32, or float64."""
    return widened(residual.flatten(-2))
