"""`normalize_weight` and `mask_indices_by_tp` on the reference grid, and their properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tile_kernels.testing.bench import make_param_id
from tile_kernels.testing.generator import generate_moe_params, generate_topk_idx
from tile_kernels.testing.numeric import assert_equal

PARAMS = list(generate_moe_params())
each_grid_point = pytest.mark.parametrize("params", PARAMS, ids=make_param_id)


def labels_of(params: dict[str, int], x: torch.Tensor) -> dict[str, int]:
    kept = {name: value for name, value in params.items() if name != "num_send_tokens"}
    return {**kept, "num_tokens": x.shape[0]}


def weights_of(params: dict[str, int]) -> torch.Tensor:
    return torch.rand(generate_topk_idx(params, device="cuda").shape, device="cuda")


@pytest.mark.gpu
@each_grid_point
def test_normalize_weight(params: dict[str, int]) -> None:
    weights = weights_of(params)
    expected = tile_kernels.torch.normalize_weight(weights)
    for result, reference in zip(tile_kernels.moe.normalize_weight(weights), expected):
        assert_equal(result, reference)


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
def test_normalize_weight_benchmark(params: dict[str, int], record_time: Any) -> None:
    weights = weights_of(params)
    record_time(tile_kernels.moe.normalize_weight, labels_of(params, weights), weights)


@pytest.mark.gpu
@pytest.mark.benchmark
@each_grid_point
def test_mask_indices_by_tp_benchmark(params: dict[str, int], record_time: Any) -> None:
    ranks, indices = params["num_ep_ranks"], generate_topk_idx(params, device="cuda")
    arguments = (params["num_experts"] * ranks, ranks, 0, 2)
    op = tile_kernels.moe.mask_indices_by_tp
    record_time(op, labels_of(params, indices), indices, *arguments)


# ---- properties ---------------------------------------------------------------------------------


def test_gradient_is_that_of_the_oracle() -> None:
    weights = torch.rand(7, 5) + 0.1
    upstream = torch.rand(7), torch.rand(7, 5)
    grads = []
    for function in (tile_kernels.moe.normalize_weight, tile_kernels.torch.normalize_weight):
        x = weights.clone().requires_grad_()
        torch.autograd.backward(function(x), upstream)
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    x = weights.clone().requires_grad_()
    tile_kernels.moe.normalize_weight(x)[1][:, 0].sum().backward()  # one result alone
    assert x.grad is not None


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
