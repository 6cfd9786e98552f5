"""References of the causal convolution behind the gate, and of its gradients.

With `T` tokens, `hc` streams and hidden size `H`, for each stream of a token,

    normed = y w / sqrt(mean(y y) + eps)
    total  = sum_j taps_j normed[t - j dilation]        over tokens not before starts[t]
    out    = silu(total), or residual + (y + silu(total))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tile_kernels.engram.convolution.plan import CHUNK, num_parts
from tile_kernels.runtime.arithmetic import widened


def engram_convolution_fwd(
    y: Tensor,
    norm_weight: Tensor,
    taps: Tensor,
    starts: Tensor,
    dilation: int,
    eps: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution, and `1 / rms` of each row; see `tile_kernels.engram`.

    >>> y, taps = torch.ones(3, 1, 8), torch.ones(2, 1, 8)
    >>> out, _ = engram_convolution_fwd(y, taps[0], taps, torch.tensor([0, 0, 2]), 1, 0.0)
    >>> out[:, 0, 0]
    tensor([0.7311, 1.7616, 0.7311])
    """
    rows = widened(y)
    rstd = torch.rsqrt(rows.square().mean(-1) + eps)
    out = F.silu(_total(rows * rstd[..., None], norm_weight, taps, starts, dilation)).to(y.dtype)
    return (out if residual is None else residual + (y + out)), rstd


def engram_convolution_bwd(
    grad_out: Tensor,
    y: Tensor,
    rstd: Tensor,
    norm_weight: Tensor,
    taps: Tensor,
    starts: Tensor,
    dilation: int,
    add_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradient of `y`, and sums over chunks of tokens of those of `taps` and `norm_weight`."""
    num_tokens, num_taps = y.shape[0], taps.shape[0]
    rows, weight = widened(y) * rstd[..., None], widened(norm_weight)
    total = _total(rows, norm_weight, taps, starts, dilation)
    share = total.sigmoid()
    slope = widened(grad_out) * share * (1 + total * (1 - share))
    token = torch.arange(num_tokens, device=y.device)
    part = token // dilation // CHUNK * dilation + token % dilation
    shape = (num_parts(num_tokens, dilation), num_taps + 1, *norm_weight.shape)
    partial = rows.new_zeros(shape)
    grad = torch.zeros_like(rows)
    for j in range(num_taps):
        seen = token - j * dilation >= (starts if j else 0)
        late, early = token[seen], token[seen] - j * dilation
        grad.index_add_(0, early, slope[late] * widened(taps[j]))
        partial[:, j].index_add_(0, part[late], slope[late] * rows[early] * weight)
    partial[:, num_taps].index_add_(0, part, grad * rows)
    grad = grad * weight
    mean = (grad * rows).mean(-1, keepdim=True)
    y_grad = rstd[..., None] * (grad - rows * mean)
    if add_grad:
        y_grad = y_grad + widened(grad_out)
    return y_grad.to(y.dtype), partial


def _total(
    rows: Tensor, norm_weight: Tensor, taps: Tensor, starts: Tensor, dilation: int
) -> Tensor:
    """The convolution of rows times the weight of their norm, before the SiLU."""
    normed = rows * widened(norm_weight)
    token = torch.arange(rows.shape[0], device=rows.device)
    total = normed * widened(taps[0])
    for j in range(1, taps.shape[0]):
        early = token - j * dilation
        past = normed[early.clamp(min=0)]
        unseen = (early < starts) | (early < 0)
        total = total + past.masked_fill(unseen[:, None, None], 0) * widened(taps[j])
    return total
