"""Reference of the loss that trains the indexer to imitate the attention."""

from __future__ import annotations

import torch
from torch import Tensor


def indexer_kl(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `tile_kernels.attention.indexer_kl`. float64 is computed in float64."""
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    p, logits = p.to(dtype), logits.to(dtype)
    there = logits != -torch.inf
    has_target = (p.sum(1, keepdim=True) != 0) & there.any(1, keepdim=True)
    safe = logits.masked_fill(~has_target, 0)
    surprise = torch.where(p > 0, p.log() - safe.log_softmax(1), 0)
    loss = torch.where(p == 0, 0, p * surprise).sum(1).masked_fill(~has_target[:, 0], 0)
    return loss, (safe.softmax(1) - p).masked_fill(~has_target, 0)
