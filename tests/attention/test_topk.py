"""Choice of the largest logits."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tile_kernels.attention import (
    indexer_topk,
)


def test_chosen_values_are_those_of_torch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 500)
    end = torch.full((20,), 500, dtype=torch.int32)
    found = indexer_topk(logits, 37, end, sorted=True)
    torch.testing.assert_close(logits.gather(1, found.long()), logits.topk(37).values)
    unsorted = indexer_topk(logits, 37, end)
    assert torch.equal(found.sort(dim=1).values, unsorted)


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_no_value_is_preferred_by_its_place(backend: str) -> None:
    """What is chosen of a permuted row are the same values."""
    torch.manual_seed(0)
    row = (4 * torch.randn(1, 900)).round()
    order = torch.randperm(900)
    end = torch.tensor([900], dtype=torch.int32)
    with tile_kernels.backend(backend):
        one = indexer_topk(row, 100, end)
        other = indexer_topk(row[:, order].contiguous(), 100, end)
    chosen = row[0, one[0].long()].sort().values
    assert torch.equal(chosen, row[:, order][0, other[0].long()].sort().values)
