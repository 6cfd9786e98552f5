"""Reference of `kv_compress_step`."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.windows_reference import as_series, scores_and_values, softmax


def kv_compress_step(
    state: tuple[Tensor, Tensor],
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One token more for each sequence; see `tile_kernels.attention.kv_compress_step`.

    >>> state = torch.zeros(1, 2, 2, 1), torch.ones(1, dtype=torch.int32)
    >>> kv_compress_step(state, torch.tensor([[3.0]]), torch.zeros(1, 1), torch.zeros(2, 1))
    (tensor([[1.5000]]), tensor([True]))
    """
    kept, lengths = state
    num_sequences, ring, vectors, channels = kept.shape
    window = bias_a.shape[0]
    if slots is None:
        slots = torch.arange(num_sequences, device=kv_a.device)
    known = (slots >= 0) & (slots < num_sequences)
    slot = slots[known].long()
    length = lengths[slot].long().clamp(min=0)
    given = torch.stack([x for x in (kv_a, z_a, kv_b, z_b) if x is not None], 1)
    kept[slot, length % ring] = given[known]
    lengths[slot] = (length + 1).to(lengths.dtype)

    completed = torch.zeros_like(known)
    completed[known] = (length + 1) % window == 0
    own, previous = torch.full_like(known, -1, dtype=torch.int64).repeat(2, 1).unbind()
    at = length // window
    halves_kept = ring // window
    own[known] = slot * ring + at % halves_kept * window
    previous[known] = torch.where(at > 0, slot * ring + (at - 1) % halves_kept * window, -1)
    firsts = [torch.where(completed, first, -1) for first in (own, previous)]
    flat = kept.view(num_sequences * ring, vectors, channels).unbind(1)
    of_a = (flat[0], flat[1], bias_a)
    of_b = () if bias_b is None else (flat[2], flat[3], bias_b)
    scores, values, _ = scores_and_values(firsts, as_series(*of_a, *of_b))
    return softmax(scores, values)[1].to(out_dtype or kv_a.dtype), completed
