"""`mask_indices_by_tp` on the reference grid, and its properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tests.moe.helpers import each_grid_point, labels_of
from tile_kernels.testing.generator import generate_topk_idx
from tile_kernels.testing.numeric import assert_equal


@pytest.mark.gpu
@pytest.mark.parametrize("num_tp_ranks", [2, 4, 8])
@each_grid_point
def test_mask_indices_by_tp(params: dict[str, int], num_tp_ranks: int) -> None:
    indices = generate_topk_idx(params, device="cuda")
    ranks = params["num_ep_ranks"]
    arguments = (params["num_experts"] * ranks, ranks, 0, num_tp_ranks)
    result = tile_kernels.moe.mask_indices_by_tp(indices, *arguments)
    assert_equal(result, tile_kernels.torch.mask_indices_by_tp(indices, *arguments))


@pytest.mark.gpu
@pytest.mark.benchmark
@each_grid_point
def test_mask_indices_by_tp_benchmark(params: dict[str, int], record_time: Any) -> None:
    ranks, indices = params["num_ep_ranks"], generate_topk_idx(params, device="cuda")
    arguments = (params["num_experts"] * ranks, ranks, 0, 2)
    op = tile_kernels.moe.mask_indices_by_tp
    record_time(op, labels_of(params, indices), indices, *arguments)


@settings(max_examples=50, deadline=None)
@given(
    per_rank=st.integers(1, 9),
    num_ep_ranks=st.integers(1, 8),
    num_tp_ranks=st.integers(1, 4),
    spare=st.integers(0, 3),
)
def test_every_expert_belongs_to_exactly_one_tp_rank(
    per_rank: int, num_ep_ranks: int, num_tp_ranks: int, spare: int
) -> None:
    """Over the ranks of a group, each index is kept once, and at most one maps to each number."""
    n = per_rank * num_ep_ranks + min(spare, num_ep_ranks - 1)
    indices = torch.arange(per_rank * num_ep_ranks).view(1, -1)
    masked = torch.stack(
        [
            tile_kernels.moe.mask_indices_by_tp(indices, n, num_ep_ranks, rank, num_tp_ranks)[0]
            for rank in range(num_tp_ranks)
        ]
    )
    assert torch.equal((masked >= 0).sum(0), torch.ones_like(masked[0]))
    for row in masked:
        kept = row[row >= 0]
        assert torch.equal(kept, torch.arange(len(kept)))
