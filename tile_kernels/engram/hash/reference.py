"""Reference of the hash of n-grams.

With `T` tokens, windows of `N` tokens, `L` layers and `E` tables per n-gram order,
`C = (N - 1) * E` tables belong to a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_offsets(vocab_sizes: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Computes the first row of each table among the rows of its layer.

    Args:
        vocab_sizes: `[L, N - 1, E]`: the sizes of the tables.
        dtype: int32, in which sums wrap around, or int64 for layers of 2^31 rows and more.

    Returns:
        `[L, C]`.

    Example:
        >>> make_offsets(torch.tensor([[[3, 4], [5, 6]], [[7, 8], [9, 10]]])).tolist()
        [[0, 3, 7, 12], [0, 7, 15, 24]]
    """
    flat = vocab_sizes.flatten(1).to(dtype)
    return flat.cumsum(1, dtype=dtype) - flat


def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Computes the row of each n-gram in each table of each layer.

    | argument | shape | dtype |
    |---|---|---|
    | `ngram_token_ids` | `[T, N]`, of `ngram_windows` | int32 |
    | `multipliers` | `[L, N]` | int64 |
    | `vocab_sizes` | `[L, N - 1, E]`: rows of each table | int32 |
    | `offsets` | `[L, C]`: first row of each table, of `make_offsets` | int32, int64 |
    | `image_token_mask`, optional | `[T]`: tokens that have -1 everywhere | bool |
    | returns | `[L, T, C]` | that of `offsets` |

    In 64 bits that wrap, with `p_i = id_i * multiplier_i`, the hash of `i + 1` tokens is
    `h_i = p_0 ^ ... ^ p_i`. Column `(i - 1) * E + j` is `h_i mod vocab_sizes[l, i - 1, j]`, never
    negative, plus its offset; a table without rows gives its offset. `N` is at least 2.

    >>> ids = torch.tensor([[5, 7, 11], [-1, 0, 2]], dtype=torch.int32)
    >>> sizes = torch.tensor([[[10, 13], [17, 19]]], dtype=torch.int32)
    >>> engram_hash(ids, torch.tensor([[3, 5, 9]]), sizes, make_offsets(sizes)).tolist()
    [[[4, 15, 34, 43], [7, 20, 23, 42]]]
    """
    window = multipliers.shape[1]
    if window < 2:
        raise ValueError(f"engram_hash: windows must have at least 2 tokens, got {window}")
    products = ngram_token_ids.long() * multipliers[:, None]  # [L, T, N]
    hashed = products[..., 0]
    columns = []
    for order in range(1, window):
        hashed = hashed ^ products[..., order]
        sizes = vocab_sizes[:, None, order - 1].long()
        columns.append(hashed[..., None] % torch.where(sizes == 0, 1, sizes))
    rows = torch.cat(columns, dim=-1) + offsets[:, None].long()
    if image_token_mask is not None:
        rows = rows.masked_fill(image_token_mask[:, None], -1)
    return rows.to(offsets.dtype)


def engram_hash_ref(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Computes `engram_hash`, under the name that TileKernels gave its reference.

    Args:
        ngram_token_ids: As in `engram_hash`.
        multipliers: As in `engram_hash`.
        vocab_sizes: As in `engram_hash`.
        offsets: As in `engram_hash`.
        image_token_mask: As in `engram_hash`.
    """
    return engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask)
