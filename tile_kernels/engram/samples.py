"""Tensors that argument sets of several operators use."""

from __future__ import annotations

import torch


def normal(*shape: int, device: torch.device, extra: int = 0, skip: int = 0) -> torch.Tensor:
    """Normal bfloat16; in rows that are `extra` elements apart, or `skip` into their storage."""
    wide = torch.randn(*shape[:-1], shape[-1] + extra, device=device).bfloat16()[..., : shape[-1]]
    if skip:
        flat = torch.cat((wide.new_zeros(skip), wide.reshape(-1)))
        return flat[skip:].view(shape)
    return wide
