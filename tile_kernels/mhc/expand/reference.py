"""References of the copy to all streams and of its gradient."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.mhc.arithmetic import rounded
from tile_kernels.runtime.arithmetic import widened


def expand_to_mhc_ref(hidden: Tensor, mhc_mult: int) -> Tensor:
    """Repeats a tensor for every stream.

    Args:
        hidden: `[..., h]`.
        mhc_mult: The number of streams `m`.

    Returns:
        `[..., m, h]`, contiguous.

    Example:
        >>> import torch
        >>> expand_to_mhc_ref(torch.tensor([1, 2]), 2).tolist()
        [[1, 2], [1, 2]]
    """
    return hidden.unsqueeze(-2).repeat(*(1,) * (hidden.dim() - 1), mhc_mult, 1)


def expand_to_mhc(hidden: Tensor, mhc_mult: int) -> Tensor:
    """`expand_to_mhc_ref`.

    >>> import torch
    >>> expand_to_mhc(torch.tensor([1, 2]), 2).tolist()
    [[1, 2], [1, 2]]
    """
    return expand_to_mhc_ref(hidden, mhc_mult)


def expand_to_mhc_bwd(grad_out: Tensor) -> Tensor:
    """The sum of the streams `[..., m, h]`, in order: `[..., h]`.

    >>> import torch
    >>> expand_to_mhc_bwd(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
    [5.0, 7.0, 9.0]
    """
    first, *others = grad_out.unbind(-2)
    total = widened(first)
    for stream in others:
        total = total + widened(stream)
    return rounded(total, grad_out.dtype)
