"""Which compressed keys a query may see."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention import indexer_reference
from tile_kernels.runtime import checks


def indexer_ranges(cu_seqlens: Tensor, ratio: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The first key of each query and the one after its last, for keys of `ratio` tokens each.

    A sequence of `n` tokens has `n // ratio` keys, and the keys of all sequences are concatenated.
    The query at position `t` of a sequence attends to the keys of which no token is later: to key
    `s` if `(s + 1) * ratio <= t + 1`. Queries before the first sequence or after the last one
    attend to none. The ranges are computed by PyTorch operations on the device of `cu_seqlens`; the
    host does not wait.

    Args:
        cu_seqlens: `[B + 1]`, int32: where sequences begin, and the end of the last.
        ratio: Tokens of a key, at least 1.
        num_tokens: `T`, the queries of all sequences together.

    Returns:
        `(start, end)`, both `[T]`, int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If `cu_seqlens` has fewer than 2 elements, or a number is too small.

    Example:
        >>> start, end = indexer_ranges(torch.tensor([0, 5, 7]).int(), 2, 7)
        >>> start.tolist(), end.tolist()
        ([0, 0, 0, 0, 0, 2, 2], [0, 1, 1, 2, 2, 2, 3])
    """
    try:
        checks.tensor("cu_seqlens", cu_seqlens, ("B + 1",), torch.int32)
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens must have at least 2 elements, got {cu_seqlens.shape[0]}")
        checks.integer("ratio", ratio, 1)
        checks.integer("num_tokens", num_tokens, 0)
    except (TypeError, ValueError) as error:
        raise type(error)(f"indexer_ranges: {error}") from None
    return indexer_reference.indexer_ranges(cu_seqlens, ratio, num_tokens)
