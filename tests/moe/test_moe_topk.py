"""The gate with image bias: gradients, random experts, ties, and what it shares with others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import moe
from tile_kernels.moe.weight.reference import gate_scores
from tile_kernels.runtime import registry
from tile_kernels.runtime.philox import philox

SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
each_scoring = pytest.mark.parametrize("scoring", SCORING)
each_ground = pytest.mark.parametrize("ground", GROUNDS)


def test_alias() -> None:
    """The same function under another name, which `help` and errors have."""
    assert inspect.unwrap(moe.moe_topk_gate) is moe.moe_topk_gate_forward
    assert inspect.signature(moe.moe_topk_gate) == inspect.signature(moe.moe_topk_gate_forward)
    assert moe.moe_topk_gate.__doc__ == moe.moe_topk_gate_forward.__doc__
    assert moe.moe_topk_gate.__name__ == "moe_topk_gate"
    assert registry.get(moe.moe_topk_gate) is registry.get(moe.moe_topk_gate_forward)


@each_ground
@each_scoring
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_and_scores_train(scoring: str, compiled: bool, ground: tuple[str, str]) -> None:
    """The gradient is that of plain PyTorch, where tokens route; a buffer takes part in it."""
    backend, device = ground
    torch.manual_seed(5)
    logits = torch.randn(6, 16, device=device, requires_grad=True)
    bias = torch.randn(16, device=device)
    token = torch.arange(6, device=device)
    grad_weights = torch.randn(6, 4, device=device)
    loss_of_scores = torch.randn(6, 16, device=device)

    def run(logits: torch.Tensor) -> tuple[Any, ...]:
        buffer = torch.empty_like(logits)
        idx, weights, scores = moe.moe_topk_gate(
            logits, 3, True, 1, 1.5, 0, scoring, mask=token != 1, bias=bias,
            force_random=token == 4, scores=buffer, with_scores=True,
        )  # fmt: skip
        return idx, weights, scores, buffer

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    torch._dynamo.reset()
    with tile_kernels.backend(backend):
        idx, weights, scores, buffer = function(logits)
        loss = (weights * grad_weights).sum() + (scores * loss_of_scores).sum()
        (loss + (buffer * loss_of_scores).sum()).backward()
    assert not idx.requires_grad
    plain = logits.detach().clone().requires_grad_()
    routes = ((token != 1) & (token != 4))[:, None]
    expected = gate_scores(plain, scoring)
    chosen = expected.gather(1, idx[:, :3].where(routes, 0))
    normalised = 1.5 * chosen / chosen.sum(1, keepdim=True)
    loss = (normalised * grad_weights[:, :3]).sum(1) + 2 * (expected * loss_of_scores).sum(1)
    (loss * routes[:, 0]).sum().backward()
    torch.testing.assert_close(scores, expected * routes, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(buffer, scores, rtol=0, atol=0)
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-4, atol=1e-6)
    assert logits.grad is not None
    assert not logits.grad[1].any()
    assert not logits.grad[4].any()


def test_a_loss_of_normalised_scores() -> None:
    """`grad_scores_sum` is what autograd computes for scores over their sum."""
    torch.manual_seed(6)
    logits = torch.randn(8, 12, requires_grad=True)
    _, weights, scores = moe.moe_topk_gate(logits, 3, False, 0, 2.5, 0, with_scores=True)
    grad_weights, h = torch.randn(8, 3), torch.randn(2, 12)
    normalised = scores / scores.sum(1, keepdim=True)
    loss = (weights * grad_weights).sum() + (normalised.view(2, 4, 12).sum(1) * h).sum()
    loss.backward()
    idx, _ = moe.moe_topk_gate(logits.detach(), 3, False, 0, 2.5, 0)
    found = moe.moe_topk_gate_backward(
        scores.detach(), idx, weights.detach(), grad_weights, 2.5, grad_scores_sum=h
    )
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-6)


@each_ground
@pytest.mark.parametrize(("experts", "topk"), [(72, 6), (256, 8), (1030, 8)])
def test_ties_go_to_the_smaller_index(experts: int, topk: int, ground: tuple[str, str]) -> None:
    backend, device = ground
    logits = torch.zeros(3, experts, device=device)
    with tile_kernels.backend(backend):
        idx, weights = moe.moe_topk_gate(logits, topk, False, 0, 1.5, 0)
    assert torch.equal(idx.cpu(), torch.arange(topk).expand(3, topk))
    torch.testing.assert_close(weights.cpu(), torch.full((3, topk), 1.5 / topk))


@each_scoring
def test_without_additions_it_is_the_scored_gate(scoring: str) -> None:
    torch.manual_seed(7)
    logits, bias = torch.randn(9, 24), torch.randn(24)
    physical = torch.randint(0, 40, (25, 3), dtype=torch.int32)
    count = torch.randint(1, 4, (25,), dtype=torch.int32)
    maps: dict[str, Any] = {"to_physical_map": physical, "logical_count": count}
    old, new = (torch.zeros(9, 5, dtype=torch.int64) for _ in range(2))
    scored = moe.top2_sum_gate(
        logits, bias, 5, 0, 0, True, 1, 1.5, 7, 1, 0, 1, scoring, unmapped_topk_idx=old, **maps
    )
    found = moe.moe_topk_gate(
        logits, 5, True, 1, 1.5, 7, scoring, bias=bias, unmapped_topk_idx=new, **maps
    )
    assert torch.equal(found[0], scored[0])
    assert torch.equal(found[1], scored[1])
    assert torch.equal(new, old)


@each_ground
def test_a_fixed_choice_without_an_expert(ground: tuple[str, str]) -> None:
    """It has weight 0 and is not in the sum."""
    backend, device = ground
    logits = torch.zeros(1, 4, device=device)
    choice = torch.tensor([[2, -1, 1]], device=device)
    fixed = torch.ones(1, dtype=torch.bool, device=device)
    with tile_kernels.backend(backend):
        idx, weights = moe.moe_topk_gate(
            logits, 3, False, 0, 1.0, 0, fix_routing_mask=fixed, unmapped_topk_idx=choice
        )
    assert idx.tolist() == [[2, -1, 1]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.5, 0.0, 0.5]]))


# ---- random experts -----------------------------------------------------------------------------


def draw(num_tokens: int, ep_rank: int, **maps: Any) -> tuple[torch.Tensor, ...]:
    everywhere = torch.ones(num_tokens, dtype=torch.bool)
    return moe.moe_topk_gate(
        torch.zeros(num_tokens, 14), 6, True, 2, 1.5, ep_rank, force_random=everywhere, **maps
    )


def test_random_experts_are_distinct_and_uniform() -> None:
    """In every slot; they depend on the rank, and are the same at every call."""
    idx, weights = draw(8192, 3)
    assert idx.shape == (8192, 8)
    assert (idx.sort(1).values.diff() > 0).all()
    for slot in idx.unbind(1):
        counts = slot.bincount(minlength=16)
        assert len(counts) == 16
        expected = 8192 / 16
        assert ((counts - expected) ** 2 / expected).sum() < 4 * 15
    assert weights.min() > 0
    assert weights.max() <= 1
    assert abs(weights.mean() - 0.5) < 0.01
    assert torch.equal(idx, draw(8192, 3)[0])
    assert not torch.equal(idx, draw(8192, 4)[0])
    assert torch.equal(idx[:100], draw(100, 3)[0])


def test_random_experts_are_physical() -> None:
    count = torch.tensor([2] * 10 + [1] * 6, dtype=torch.int32)
    physical = torch.zeros(16, 2, dtype=torch.int32)
    idx, _ = draw(4096, 0, to_physical_map=physical, logical_count=count)
    assert idx.unique().tolist() == list(range(26))


def test_philox_words() -> None:
    """The published answer for key 0 and counter 0; all 64 bits of seed and sequence matter."""
    words = philox(0, torch.tensor([0]))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    late = philox(2**40 + 5, torch.tensor([2**33 + 7, 7]))
    assert all(int(word[0]) != int(word[1]) for word in late)
    assert int(late[0][1]) != int(philox(5, torch.tensor([7]))[0])
