"""Reference of `ngram_windows`."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_windows(
    token_ids: Tensor,
    max_ngram_size: int,
    pad_id: int,
    cu_seqlens: Tensor | None = None,
    token_map: Tensor | None = None,
) -> Tensor:
    """Returns each token together with those before it in its document.

    | argument | shape | dtype |
    |---|---|---|
    | `token_ids` | `[S]`, or `[B, S]`: each row is a separate text | int32, int64 |
    | `cu_seqlens`, optional | `[D + 1]`: starts in the flattened tokens | int32, int64 |
    | `token_map`, optional | `[V]`: the id that stands for each id | int32, int64 |
    | returns | `[*token_ids.shape, max_ngram_size]` | int32 |

    Column 0 is the token, column `i` the one `i` positions before it. From the first column on that
    would lie before the document, or that is `pad_id`, all columns are `pad_id`. A token that is
    `pad_id` itself has only those. `token_map` applies first; ids outside of it become `pad_id`.
    Without a map ids keep their lower 32 bits. Boundaries outside of the tokens are ignored.

    >>> ngram_windows(torch.tensor([5, 6, 0, 7, 8]), 3, pad_id=0).tolist()
    [[5, 0, 0], [6, 5, 0], [0, 0, 0], [7, 0, 0], [8, 7, 0]]
    >>> ngram_windows(torch.tensor([5, 6, 7]), 2, pad_id=-1, cu_seqlens=torch.tensor([0, 1, 3]))
    tensor([[ 5, -1],
            [ 6, -1],
            [ 7,  6]], dtype=torch.int32)
    """
    if max_ngram_size < 1:
        raise ValueError(f"ngram_windows: max_ngram_size must be at least 1, got {max_ngram_size}")
    flat = token_ids.reshape(-1)
    num_tokens = flat.numel()
    if token_map is not None:
        flat = mapped_ids(flat, token_map, pad_id)
    flat = flat.to(torch.int32)

    row_length = token_ids.shape[-1]
    position = torch.arange(num_tokens, device=flat.device)
    starts = position % max(row_length, 1) == 0
    if cu_seqlens is not None:
        inside = (cu_seqlens >= 0) & (cu_seqlens < num_tokens)
        boundary = torch.where(inside, cu_seqlens, num_tokens).long()
        marked = starts.new_zeros(num_tokens + 1).index_fill(0, boundary, True)
        starts = starts | marked[:num_tokens]

    known = flat != pad_id  # columns 0..i are tokens of the document
    columns = [flat]
    for distance in range(1, max_ngram_size):
        before = shifted_down(flat, distance, pad_id)
        known = known & ~shifted_down(starts, distance - 1, True) & (before != pad_id)
        columns.append(torch.where(known, before, pad_id))
    return torch.stack(columns, dim=-1).view(*token_ids.shape, max_ngram_size)


def mapped_ids(token_ids: Tensor, token_map: Tensor, pad_id: int) -> Tensor:
    """`token_map[token_ids]`, and `pad_id` for ids outside of the map.

    >>> mapped_ids(torch.tensor([0, 2, 3, -1]), torch.tensor([10, 11, 12]), 99).tolist()
    [10, 12, 99, 99]
    """
    size = token_map.shape[0]
    with_pad = torch.cat((token_map, token_map.new_full((1,), pad_id)))
    return with_pad[torch.where((token_ids >= 0) & (token_ids < size), token_ids, size).long()]


def shifted_down(x: Tensor, distance: int, fill: int) -> Tensor:
    """`x` shifted to later positions along its only dimension; the first ones are `fill`.

    >>> shifted_down(torch.tensor([1, 2, 3]), 2, 0).tolist()
    [0, 0, 1]
    """
    distance = min(distance, x.shape[0])
    return torch.cat((x.new_full((distance,), fill), x[: x.shape[0] - distance]))
