"""References of attention while decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.cache.reference import kv_cache_gather
from tile_kernels.attention.decode.plan import (
    CANDIDATES,
    COMBINE_COST,
    FIXED_COST,
    HEADS,
    DecodePlan,
    num_pairs,
)
from tile_kernels.attention.softmax_reference import attend


def attended(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    sm_scale: float,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`; see `tile_kernels.attention.sparse_attention_decode`."""
    num_requests, s_q, heads, channels = q.shape
    tokens = num_requests * s_q
    rows, valid = [], []
    for pages, slots, lengths in (
        (cache, indices, topk_length),
        (extra_cache, extra_indices, extra_topk_length),
    ):
        if pages is None or slots is None:
            continue
        k = slots.shape[2]
        some = (slots >= 0) & (slots.long() < pages.shape[0] * pages.shape[1])
        if lengths is not None:
            some &= torch.arange(k, device=q.device) < lengths[:, None, None]
        rows.append(kv_cache_gather(pages, slots.flatten()).view(tokens, k, channels))
        valid.append(some.view(tokens, k))
    keys, known = torch.cat(rows, 1), torch.cat(valid, 1)
    width = known.shape[1]
    index = torch.arange(tokens * width, device=q.device).view(tokens, width)
    out, _top, lse = attend(
        q.reshape(tokens, heads, channels), keys.view(-1, channels),
        lambda some: (index[some], known[some]), width, sm_scale, sink,
    )  # fmt: skip
    shape = (num_requests, s_q, heads)
    return out.view(*shape, out.shape[2]), lse.view(shape).transpose(1, 2).clone(
        memory_format=torch.contiguous_format
    )


def sparse_attention_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    plan: Any = None,  # noqa: ARG001
    splits: str | int = "fixed",  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """See `tile_kernels.attention.sparse_attention_decode`: splits do not change the value."""
    return attended(
        q, cache, indices, sm_scale, sink, topk_length, extra_cache, extra_indices,
        extra_topk_length,
    )  # fmt: skip


def decode_plan(
    q: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    num_sms: int | None = None,
) -> DecodePlan:
    """See `tile_kernels.attention.decode_plan`."""
    num_requests, s_q, heads, _ = q.shape
    k, extra_k = indices.shape[2], 0 if extra_indices is None else extra_indices.shape[2]
    blocks = max((num_sms or 132) // (s_q * -(-heads // HEADS)), 1)
    num_items = blocks + num_requests
    longest = max(num_pairs(k, extra_k), 1)

    def lengths_of(given: Tensor | None, most: int) -> list[int]:
        if given is None:
            return [most] * num_requests
        return given.clamp(0, most).tolist()

    lengths = lengths_of(topk_length, k)
    extra = lengths_of(extra_topk_length if extra_indices is not None else None, extra_k)
    pairs = [num_pairs(*each) for each in zip(lengths, extra)]
    best = None
    for count in range(1, CANDIDATES + 1):
        size = -(-longest // count)
        total = sum(max(-(-each // size), 1) for each in pairs)
        cost = -(-total // blocks) * (2 * size + FIXED_COST) + COMBINE_COST * (size < longest)
        if total <= num_items and (best is None or (cost, -size) < best):
            best = (cost, -size)
    size = longest if best is None else -best[1]
    items: list[list[int]] = []
    splits: list[list[int]] = []
    for request, each in enumerate(pairs):
        count = max(-(-each // size), 1)
        splits.append([len(items), count])
        step = -(-each // count)
        for s in range(count):
            at = len(items)
            items.append([request, min(s * step, each), min(s * step + step, each), at])
    items += [[0, 0, 0, -1]] * (num_items - len(items))
    table = torch.tensor(items, dtype=torch.int32).view(num_items, 4)
    cuts = torch.tensor(splits, dtype=torch.int32).view(-1, 2)
    return table.to(q.device), cuts.to(q.device)
