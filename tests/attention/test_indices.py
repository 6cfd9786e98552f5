"""Lists of rows for attention."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.attention import attention_indices, indexer_ranges


def test_lists_have_no_holes() -> None:
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([2, 40, 90], dtype=torch.int32)
    selected = torch.randint(-5, 30, (100, 17), dtype=torch.int32)
    indices, lengths = attention_indices(selected, cu_seqlens, window=6, ratio=3)
    place = torch.arange(indices.shape[1])
    assert torch.equal(indices >= 0, place < lengths[:, None])
    start, end = indexer_ranges(cu_seqlens, 3, 100)
    for token in range(100):
        rows = indices[token, : lengths[token]].tolist()
        first = 2 if token < 40 else 40
        inside = 2 <= token < 90
        window = list(range(max(first, token - 5), token + 1)) if inside else []
        seen = [x for x in selected[token].tolist() if start[token] <= x < end[token]]
        assert rows == window + [100 + x for x in seen]


def test_windows_alone_need_the_number_of_tokens() -> None:
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    indices, lengths = attention_indices(None, cu_seqlens, window=2, ratio=0, num_tokens=4)
    assert indices.tolist() == [[0, -1], [0, 1], [1, 2], [-1, -1]]
    assert lengths.tolist() == [1, 2, 2, 0]
    with pytest.raises(TypeError, match="attention_indices: num_tokens"):
        attention_indices(None, cu_seqlens)
