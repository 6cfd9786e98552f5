"""Ranges of keys that queries see."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.attention import (
    indexer_ranges,
)

# ---- ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_ranges_are_causal(ratio: int) -> None:
    lengths = [5, 0, 1, 300, 4, 7]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    start, end = indexer_ranges(bounds, ratio, sum(lengths))
    token = first_key = 0
    for length in lengths:
        for position in range(length):
            keys = range(length // ratio)
            seen = [first_key + s for s in keys if (s + 1) * ratio <= position + 1]
            assert list(range(start[token], end[token])) == seen
            token += 1
        first_key += length // ratio


def test_queries_outside_of_all_sequences_see_nothing() -> None:
    start, end = indexer_ranges(torch.tensor([2, 6]).int(), 2, 9)
    assert (end - start).tolist() == [0, 0, 0, 1, 1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("bounds", "ratio", "tokens", "name"),
    [
        ([0], 2, 3, "cu_seqlens"),
        ([0, 3], 0, 3, "ratio"),
        ([0, 3], 2, -1, "num_tokens"),
        ([0, 3], True, 3, "ratio"),
    ],
)
def test_bad_ranges_are_refused(bounds: list[int], ratio: int, tokens: int, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^indexer_ranges: {name}"):
        indexer_ranges(torch.tensor(bounds).int(), ratio, tokens)
    with pytest.raises(TypeError, match=r"^indexer_ranges: cu_seqlens"):
        indexer_ranges(torch.tensor([0, 3]), 2, 3)
