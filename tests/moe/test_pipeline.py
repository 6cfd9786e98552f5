"""Routing as one: gate, mapping, expand, identity experts, weighted reduce."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tile_kernels import moe

BACKENDS = [  # backend, device, number of examples
    pytest.param(("torch", "cpu", 60), id="torch"),
    pytest.param(("emulate", "cpu", 12), id="emulate"),
    pytest.param(("tilelang", "cuda", 60), id="cuda", marks=pytest.mark.gpu),
]
# Experts, top-k and hidden size are compiled in: few combinations, so that compiling stays short.
SIZES = [(1, 1, 7), (3, 2, 64), (8, 6, 1), (33, 4, 64)]


@dataclass(frozen=True)
class Problem:
    num_tokens: int
    num_experts: int
    num_topk: int
    hidden: int
    alignment: int
    shape: str  # how the experts are chosen
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_experts, num_topk, hidden = draw(st.sampled_from(SIZES))
    return Problem(
        num_tokens=draw(st.sampled_from([0, 1, 2, 17, 64])),
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        alignment=draw(st.sampled_from([1, 4, 16])),
        shape=draw(st.sampled_from(["random", "one expert", "masked", "half masked", "ties"])),
        seed=draw(st.integers(0, 1000)),
    )


@dataclass(frozen=True)
class Routed:
    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    mapping: tuple[object, ...]
    result: torch.Tensor


def inputs(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, logits and the mask of tokens that route."""
    generator = torch.Generator().manual_seed(problem.seed)
    shape = (problem.num_tokens, problem.num_experts)
    logits = torch.randn(shape, generator=generator)
    if problem.shape == "one expert":
        logits[:, problem.num_experts // 2] = 50
    if problem.shape == "ties":
        logits.zero_()
    mask = torch.ones(problem.num_tokens, dtype=torch.bool)
    if problem.shape == "masked":
        mask[:] = False
    if problem.shape == "half masked":
        mask[::2] = False
    x = torch.randn(problem.num_tokens, problem.hidden, generator=generator)
    return x.to(device), logits.to(device), mask.to(device)


def route(problem: Problem, x: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor) -> Routed:
    bias = torch.zeros(problem.num_experts, device=x.device)
    idx, weights = moe.top2_sum_gate(
        logits, bias, problem.num_topk, 0, 0, False, 0, 1.0, 0, 1, 0, 1, "sigmoid", mask=mask
    )
    mapping = moe.get_fused_mapping(idx, problem.num_experts, 0, problem.alignment)
    expanded = moe.expand_to_fused(x, mapping[3], mapping[0])
    result = moe.reduce_fused(expanded, weights, mapping[3])
    return Routed(x, idx, weights, mapping, result)


def check_counts(problem: Problem, routed: Routed, mask: torch.Tensor) -> None:
    """Every choice has one row; rows of an expert are its tokens, padding is at the end."""
    expert, token, slot, place, start, end, number, counts = routed.mapping
    valid = routed.idx >= 0
    assert int(valid.sum()) == int(mask.sum()) * problem.num_topk
    assert number.tolist() == counts == (end - start).tolist()
    assert sum(counts) == expert.shape[0] == token.shape[0] == slot.shape[0]
    assert all(count % problem.alignment == 0 for count in counts)
    raw = moe.group_count(routed.idx, problem.num_experts)
    assert (number >= raw).all()
    assert (number < raw + problem.alignment).all()
    used = place[valid].long()
    assert used.unique().numel() == used.numel()
    assert torch.equal(expert[used].long(), routed.idx[valid])
    assert int((expert >= 0).sum()) == used.numel()
    load = moe.aux_fi(routed.idx, problem.num_experts, problem.num_topk)
    if problem.num_tokens:
        share = float(mask.sum()) / problem.num_tokens
        assert abs(float(load.sum()) / problem.num_experts - share) < 1e-5


@pytest.mark.parametrize("ground", BACKENDS)
def test_routing_is_a_weighted_sum(ground: tuple[str, str, int]) -> None:
    backend, device, examples = ground

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(problems())
    def check(problem: Problem) -> None:
        x, logits, mask = inputs(problem, device)
        with tile_kernels.backend(backend):
            routed = route(problem, x, logits, mask)
            check_counts(problem, routed, mask)
        # Identity experts: each token is itself times the sum of its weights, which is 1 or 0.
        scale = routed.weights.double().sum(1, keepdim=True)
        torch.testing.assert_close(scale, mask[:, None].double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(routed.result.double(), x.double() * scale, rtol=1e-5, atol=1e-6)

    check()


@pytest.mark.parametrize("ground", BACKENDS)
def test_permuting_tokens_permutes_results(ground: tuple[str, str, int]) -> None:
    backend, device, examples = ground

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(problems(), st.randoms(use_true_random=False))
    def check(problem: Problem, random: object) -> None:
        x, logits, mask = inputs(problem, device)
        order = list(range(problem.num_tokens))
        random.shuffle(order)  # type: ignore[attr-defined]
        where = torch.tensor(order, dtype=torch.int64, device=device)
        with tile_kernels.backend(backend):
            one = route(problem, x, logits, mask)
            other = route(problem, x[where], logits[where], mask[where])
        assert torch.equal(one.result[where], other.result)  # to the bit
        assert torch.equal(one.idx[where], other.idx)
        assert one.mapping[7] == other.mapping[7]

    check()
