"""Which compressed keys a query may see."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.torch import indexer as oracles


def indexer_ranges(cu_seqlens: Tensor, ratio: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The first key of each query and the one after its last, for keys of `ratio` tokens each.

    | argument | shape | dtype |
    |---|---|---|
    | `cu_seqlens` | `[B + 1]`: where sequences begin, and the end of the last | int32 |
    | `ratio` | tokens of a key, from 1 on | int |
    | `num_tokens` | `T`, queries of all sequences together | int |
    | returns `start`, `end` | `[T]` | int32 |

    A sequence of `n` tokens has `n // ratio` keys, one after the other's. Its query at position `t`
    sees those whose tokens are all there: key `s` if `(s + 1) * ratio <= t + 1`. Queries before the
    first sequence or after the last see none. In PyTorch, on the device of `cu_seqlens`, without
    waiting for it.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> start, end = indexer_ranges(torch.tensor([0, 5, 7]).int(), 2, 7)
    >>> start.tolist(), end.tolist()
    ([0, 0, 0, 0, 0, 2, 2], [0, 1, 1, 2, 2, 2, 3])
    """
    try:
        checks.tensor("cu_seqlens", cu_seqlens, ("B + 1",), torch.int32)
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens must have 2 elements at least, got {cu_seqlens.shape[0]}")
        checks.integer("ratio", ratio, 1)
        checks.integer("num_tokens", num_tokens, 0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"indexer_ranges: {error}") from None
    return oracles.indexer_ranges(cu_seqlens, ratio, num_tokens)
