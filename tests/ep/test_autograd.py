"""Dispatch and combine as each other's gradient, against the plain formula.

All numbers are small integers, so that sums are exact in any order and gradients equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ep.helpers import Case, make_buffer
from tests.ep.processes import run_processes
from tile_kernels.ep import ElasticBuffer, EPHandle, LocalGroup, run_ranks
from tile_kernels.testing.numeric import assert_equal

CASES: dict[str, dict[str, Any]] = {
    "one rank": {"ranks_per_node": 1, "tokens": (6,)},
    "direct": {"ranks_per_node": 3, "tokens": (5, 0, 4), "num_topk": 4, "experts_per_rank": 3},
    "2x2": {"num_nodes": 2, "tokens": (5, 3, 0, 4), "num_topk": 6, "experts_per_rank": 3},
}
WIDTH = ((torch.float32, 3),)


def integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def expert_rows(
    rows: Tensor, ids: Tensor | None, weights: Tensor, handle: EPHandle, rank: int
) -> Tensor:
    """Expert `e` multiplies by `e + 2`, and by the weight of the slot."""
    num_local = handle.num_unaligned_recv_tokens_per_expert.numel()
    factors = torch.arange(num_local) + rank * num_local + 2.0
    if ids is not None:
        scale = torch.where(ids >= 0, factors[ids.clamp(min=0)] * weights, 0.0).sum(1)
        return rows * scale[:, None]
    counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
    return rows * (factors.repeat_interleave(counts) * weights)[:, None]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Equal numbers; the formula has zeros of either sign."""
    assert torch.equal(found, wanted), (found, wanted)


def check_layer(group: Any, case: Case) -> None:
    """A layer forward and backward on this rank."""
    buffer = make_buffer(group, case)
    rank = buffer.rank_idx
    ids = case.topk_idx[rank]
    num_tokens, num_topk = ids.shape
    x = integers(num_tokens, 3, seed=rank).requires_grad_()
    weights = integers(num_tokens, num_topk, seed=rank + 10).requires_grad_()
    bias = integers(num_tokens, 3, seed=rank + 20).requires_grad_()
    grad = integers(num_tokens, 3, seed=rank + 30)

    rows, recv_idx, recv_weights, handle, _ = buffer.dispatch(
        x, ids, weights, num_experts=case.num_experts, expert_alignment=2, do_expand=case.expand
    )
    assert recv_weights is not None
    assert isinstance(rows, Tensor)
    out, _, _ = buffer.combine(
        expert_rows(rows, recv_idx, recv_weights, handle, rank), handle, bias=(bias, bias)
    )
    out.backward(grad)

    scales = torch.where(ids >= 0, ids + 2.0, 0.0)
    total = (scales * weights).sum(1, keepdim=True)
    assert_same(out.detach(), (x * total + 2 * bias).detach())
    assert x.grad is not None
    assert_same(x.grad, (grad * total).detach())
    assert weights.grad is not None
    assert_same(weights.grad, (scales * (grad * x).sum(1, keepdim=True)).detach())
    assert bias.grad is not None
    assert_same(bias.grad, 2 * grad)


def check_weights(group: Any, case: Case) -> None:
    """Weights there and back, without rows that want a gradient."""
    buffer = make_buffer(group, case)
    rank = buffer.rank_idx
    ids = case.topk_idx[rank]
    x = torch.zeros(len(ids), 3)
    weights = integers(*ids.shape, seed=rank).requires_grad_()
    rows, _, recv_weights, handle, _ = buffer.dispatch(
        x, ids, weights, num_experts=case.num_experts, do_expand=case.expand
    )
    assert isinstance(rows, Tensor)
    assert not rows.requires_grad
    assert recv_weights is not None
    _, back, _ = buffer.combine(rows, handle, topk_weights=3 * recv_weights)
    assert back is not None
    assert_same(back.detach(), torch.where(ids >= 0, 3 * weights, 0.0).detach())
    grad = integers(*ids.shape, seed=rank + 1)
    back.backward(grad)
    assert weights.grad is not None
    assert_same(weights.grad, torch.where(ids >= 0, 3 * grad, 0.0))


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_layer(name: str, expand: bool) -> None:
    case = Case(**CASES[name], widths=WIDTH, expand=expand)
    run_ranks(case.num_ranks, lambda group: check_layer(group, case))
    run_ranks(case.num_ranks, lambda group: check_weights(group, case))


def test_layer_with_one_sum() -> None:
    """Of the compact layout; in the expanded one the weights cannot come back."""
    case = Case(**CASES["2x2"], widths=WIDTH, multiple_reduction=False)
    run_ranks(case.num_ranks, lambda group: check_layer(group, case))


def layers(group: Any) -> None:
    for expand in (False, True):
        case = Case(num_nodes=2, ranks_per_node=1, tokens=(5, 4), widths=WIDTH, expand=expand)
        check_layer(group, case)
        check_weights(group, case)


def test_layer_between_processes() -> None:
    run_processes(2, layers)


def test_bfloat16_gradients_are_those_calls() -> None:
    """Backward is combine, and dispatch, of the gradient: bit for bit."""
    case = Case(2, 2, tokens=(5, 3, 1, 4), num_topk=6, experts_per_rank=3)

    def rank(group: LocalGroup) -> None:
        buffer, me = make_buffer(group, case), group.rank
        x = case.payloads[me][0].clone().requires_grad_()
        rows, _, _, handle, _ = buffer.dispatch(x, case.topk_idx[me], num_experts=12)
        assert isinstance(rows, Tensor)
        grad = torch.randn(rows.shape).bfloat16()
        (found,) = torch.autograd.grad(rows, x, grad)
        assert_equal(found, buffer.combine(grad, handle)[0])
        leaf = rows.detach().requires_grad_()
        grad = torch.randn(x.shape).bfloat16()
        (found,) = torch.autograd.grad(buffer.combine(leaf, handle)[0], leaf, grad)
        assert_equal(found, buffer.dispatch(grad, handle=handle)[0])

    run_ranks(4, rank)


def test_gradients_of_several_payloads() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2)
        a = torch.ones(2, 2, requires_grad=True)
        marks = torch.arange(2).view(2, 1)
        b = torch.ones(2, 5, requires_grad=True)
        ids = torch.tensor([[0, 1], [1, -1]])
        (ra, rm, rb), *_ = buffer.dispatch((a, marks, b), ids, num_experts=2)
        assert not rm.requires_grad
        (ra.sum() + 2 * rb.sum()).backward()
        copies = torch.tensor([[2.0], [1.0]])
        assert a.grad is not None
        assert_equal(a.grad, copies.expand(2, 2).contiguous())
        assert b.grad is not None
        assert_equal(b.grad, 2 * copies.expand(2, 5).contiguous())

    run_ranks(2, rank)


def test_weights_that_combine_does_not_read_have_no_gradient() -> None:
    def rank(group: LocalGroup) -> list[list[float]]:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=2)
        rows, _, _, handle, _ = buffer.dispatch(
            torch.ones(1, 2), torch.tensor([[2, 0, -1]]), num_experts=4
        )
        weights = torch.ones(2, 3, requires_grad=True)
        _, back, _ = buffer.combine(rows, handle, topk_weights=weights)
        back.backward(torch.tensor([[1.0, 2.0, 3.0]]) + 10 * group.rank)
        return weights.grad.tolist()

    assert run_ranks(2, rank) == [[[0, 2, 0], [0, 12, 0]], [[1, 0, 0], [11, 0, 0]]]


def test_second_derivatives() -> None:
    """Backward is made of the same differentiable calls."""
    buffer = ElasticBuffer(LocalGroup(), num_max_tokens_per_rank=4, hidden=2)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    rows, _, _, handle, _ = buffer.dispatch(x, torch.tensor([[0, 1], [1, -1]]), num_experts=2)
    assert isinstance(rows, Tensor)
    out = buffer.combine(rows**3, handle)[0]
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_equal(first.detach(), 3 * x.detach() ** 2)
    assert_equal(second, 6 * x.detach())


def test_without_gradients_nothing_is_recorded() -> None:
    buffer = ElasticBuffer(LocalGroup(), num_max_tokens_per_rank=4, hidden=2)
    x = torch.ones(1, 2, requires_grad=True)
    with torch.no_grad():
        rows, _, _, handle, _ = buffer.dispatch(x, torch.tensor([[0]]), num_experts=2)
        assert isinstance(rows, Tensor)
        assert not rows.requires_grad
        assert not buffer.combine(rows, handle)[0].requires_grad


def test_only_what_has_a_gradient_asks_for_one() -> None:
    buffer = ElasticBuffer(LocalGroup(), num_max_tokens_per_rank=4, hidden=2)
    x, weights = torch.ones(1, 2), torch.ones(1, 1)
    for which in (x, weights):
        which.requires_grad_()
        rows, _, carried, handle, _ = buffer.dispatch(
            x, torch.tensor([[0]]), weights, num_experts=2
        )
        assert isinstance(rows, Tensor)
        assert carried is not None
        assert (rows.requires_grad, carried.requires_grad) == (which is x, which is weights)
        out, back, _ = buffer.combine(rows, handle, topk_weights=carried)
        assert back is not None
        assert (out.requires_grad, back.requires_grad) == (which is x, which is weights)
        which.requires_grad_(False)
