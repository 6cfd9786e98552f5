"""The Sinkhorn kernels as NeMo Automodel builds and calls them, at the path where it imports them.

NeMo takes them only if `tile_kernels.modeling.mhc.ops.sinkhorn_normalize` is there too. The names
begin with an underscore in TileKernels, where they are factories of TileLang kernels.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tile_kernels.mhc.sinkhorn.op import SINKHORN_NORMALIZE, SINKHORN_NORMALIZE_BWD
from tile_kernels.runtime import checks

__all__ = ["_mhc_sinkhorn_bwd", "_mhc_sinkhorn_fwd"]


def _check(hidden_size: int, token_block: int, x: Tensor | None = None) -> None:
    with checks.named("mhc_sinkhorn"):
        checks.integer("hidden_size", hidden_size, 1)
        checks.integer("token_block", token_block, 1)
        if x is not None and x.shape[-1] != hidden_size:
            raise ValueError(f"x must hold matrices of {hidden_size} rows, got {tuple(x.shape)}")


def _mhc_sinkhorn_fwd(
    hidden_size: int, token_block: int, repeat: int, eps: float
) -> Callable[[Tensor, Tensor], None]:
    """Makes what normalises matrices into a given tensor.

    Args:
        hidden_size: Rows of a matrix.
        token_block: Matrices of a block in TileKernels; has no effect here.
        repeat: As of `mhc.sinkhorn_normalize`.
        eps: As of `mhc.sinkhorn_normalize`.

    Returns:
        `kernel(x, out)`, both `[N, hidden_size, hidden_size]`, float32.

    Example:
        >>> import torch
        >>> x, out = torch.zeros(1, 2, 2), torch.empty(1, 2, 2)
        >>> _mhc_sinkhorn_fwd(2, 1, 10, 0.0)(x, out)
        >>> out
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    _check(hidden_size, token_block)

    def kernel(x: Tensor, out: Tensor) -> None:
        _check(hidden_size, token_block, x)
        SINKHORN_NORMALIZE(x.detach(), repeat, eps, out=out)

    return kernel


def _mhc_sinkhorn_bwd(
    hidden_size: int, token_block: int, repeat: int, eps: float
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Makes what writes the gradient of the logits into a given tensor.

    Args:
        hidden_size: Rows of a matrix.
        token_block: Matrices of a block in TileKernels; has no effect here.
        repeat: As of `mhc.sinkhorn_normalize_bwd`.
        eps: As of `mhc.sinkhorn_normalize_bwd`.

    Returns:
        `kernel(grad_out, x, grad_x)`, all `[N, hidden_size, hidden_size]`, float32.
    """
    _check(hidden_size, token_block)

    def kernel(grad_out: Tensor, x: Tensor, grad_x: Tensor) -> None:
        _check(hidden_size, token_block, x)
        SINKHORN_NORMALIZE_BWD(grad_out, x.detach(), repeat, eps, out=grad_x)

    return kernel
