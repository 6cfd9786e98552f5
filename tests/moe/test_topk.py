"""`topk_gate` on the reference grid, against independent definitions, and its benchmark."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tile_kernels.testing.bench import make_param_id
from tile_kernels.testing.generator import generate_num_tokens
from tile_kernels.testing.numeric import assert_equal

EXPERTS_AND_TOPK = [
    (72, 6), (32, 6), (64, 6), (96, 6), (16, 6), (36, 6), (108, 6), (128, 6), (144, 6), (256, 8),
]  # fmt: skip


def grid(is_benchmark: bool = False) -> list[dict[str, int]]:
    return [
        {"num_tokens": num_tokens, "num_experts": num_experts, "num_topk": num_topk}
        for num_tokens in generate_num_tokens(is_benchmark=is_benchmark)
        for num_experts, num_topk in EXPERTS_AND_TOPK
    ]


def scores_of(params: dict[str, int]) -> torch.Tensor:
    return torch.randn(params["num_tokens"], params["num_experts"], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("params", grid(), ids=make_param_id)
def test_topk_gate(params: dict[str, int]) -> None:
    scores = scores_of(params)
    result = tile_kernels.moe.topk_gate(scores, params["num_topk"])
    assert_equal(result, tile_kernels.torch.stable_topk(scores, params["num_topk"]))


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.parametrize("params", grid(is_benchmark=True), ids=make_param_id)
def test_topk_gate_benchmark(params: dict[str, int], record_time: Any) -> None:
    record_time(tile_kernels.moe.topk_gate, params, scores_of(params), params["num_topk"])


def group_grid(is_benchmark: bool = False) -> list[dict[str, int]]:
    return [
        {
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "num_groups": num_groups,
            "num_topk_sum": num_topk_sum,
            "num_topk_groups": num_topk_groups,
        }
        for num_tokens in generate_num_tokens(is_benchmark=is_benchmark)
        for num_experts in (72, 256)
        for num_groups in (4, 8, 12, 16)
        if num_experts % num_groups == 0
        for num_topk_sum in (1, 2)
        for num_topk_groups in (2, 4)
    ]


def group_arguments(params: dict[str, int]) -> tuple[torch.Tensor, int, int]:
    scores = scores_of(params).view(params["num_tokens"], params["num_groups"], -1)
    return scores, params["num_topk_sum"], params["num_topk_groups"]


@pytest.mark.gpu
@pytest.mark.parametrize("params", group_grid(), ids=make_param_id)
def test_topk_sum_and_topk_group_idx(params: dict[str, int]) -> None:
    arguments = group_arguments(params)
    result = tile_kernels.moe.topk_sum_and_topk_group_idx(*arguments)
    assert_equal(result, tile_kernels.torch.topk_sum_and_topk_group_idx(*arguments))


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.parametrize("params", group_grid(is_benchmark=True), ids=make_param_id)
def test_topk_sum_and_topk_group_idx_benchmark(params: dict[str, int], record_time: Any) -> None:
    op = tile_kernels.moe.topk_sum_and_topk_group_idx
    record_time(op, params, *group_arguments(params))


# ---- the reference, against definitions of its own ----------------------------------------------

SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.5]


def selected_by_python(row: list[float], num_topk: int) -> list[int]:
    """NaN first, then by value; Python's sort is stable, and -0.0 == 0.0 there too."""
    nans = [i for i, score in enumerate(row) if math.isnan(score)]
    rest = [i for i, score in enumerate(row) if not math.isnan(score)]
    return (nans + sorted(rest, key=lambda i: -row[i]))[:num_topk]


@settings(max_examples=200, deadline=None)
@given(row=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40), data=st.data())
def test_reference_is_a_stable_descending_sort(row: list[float], data: st.DataObject) -> None:
    num_topk = data.draw(st.integers(1, len(row)))
    scores = torch.tensor([row], dtype=torch.float32)
    expected = selected_by_python(row, num_topk)
    assert tile_kernels.torch.stable_topk(scores, num_topk).tolist() == [expected]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), num_experts=st.sampled_from([8, 33, 72]))
def test_permuting_tokens_permutes_the_result(seed: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(9, num_experts, generator=generator)
    order = torch.randperm(9, generator=generator)
    result = tile_kernels.moe.topk_gate(scores, 5)
    assert torch.equal(tile_kernels.moe.topk_gate(scores[order], 5), result[order])


def test_more_experts_than_there_are_gives_all_in_the_reference() -> None:
    assert tile_kernels.torch.stable_topk(torch.randn(3, 4), 9).shape == (3, 4)


def test_documented_sentences() -> None:
    scores = torch.randn(4, 256)
    with pytest.raises(ValueError, match=r"^topk_gate: num_topk must be in 1\.\.256 \(the number"):
        tile_kernels.moe.topk_gate(scores, 300)
    with pytest.raises(ValueError, match=r"^topk_gate: scores must have 2 dimensions \[num_tokens"):
        tile_kernels.moe.topk_gate(scores[0], 3)
    with pytest.raises(TypeError, match=r"^topk_gate: scores must be float32, got bfloat16$"):
        tile_kernels.moe.topk_gate(scores.bfloat16(), 3)
