"""Random numbers by the names of TileKernels: PyTorch's generators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["randn", "randn_like", "set_seed"]


def randn(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Normal numbers: `torch.randn`.

    Args:
        *size: The sizes, or one tuple or list of them.
        dtype: By default PyTorch's default dtype.
        device: By default PyTorch's default device.

    Returns:
        A tensor of that size.

    Example:
        >>> set_seed(0)
        >>> randn(2, 3).shape, randn([2]).shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    is_sequence = len(size) == 1 and isinstance(size[0], (tuple, list))
    shape: Any = size[0] if is_sequence else size
    device = torch.get_default_device() if device is None else device
    return torch.randn(shape, dtype=dtype, device=device)


def randn_like(input: Tensor) -> Tensor:  # noqa: A002 - its name in TileKernels and PyTorch
    """Returns normal numbers with the shape, dtype and device of a tensor: `torch.randn_like`.

    Args:
        input: A tensor of any shape.
    """
    return torch.randn_like(input)


def set_seed(seed: int) -> None:
    """Seeds the generators of all devices: `torch.manual_seed`.

    Args:
        seed: The seed.
    """
    torch.manual_seed(seed)
