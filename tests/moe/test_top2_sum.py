"""The scored gate: gradients, ties, NaN, replicas, masked tokens; the scoring functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import torch as references
from tile_kernels.moe.scoring import ScoringFunc

SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
PLAIN = (False, 0, 1.5, 0, 1, 0, 1)  # no shared experts, factor, one rank
each_scoring = pytest.mark.parametrize("scoring", SCORING)
each_ground = pytest.mark.parametrize("ground", GROUNDS)


def test_scoring_functions() -> None:
    assert [str(f) for f in ScoringFunc] == ["sigmoid", "sqrtsoftplus", "softmax", "identity"]
    assert [int(f) for f in ScoringFunc] == [0, 1, 2, 3]
    assert f"{ScoringFunc.SOFTMAX}" == "softmax"
    assert ScoringFunc.from_str("SoftMax") is ScoringFunc.SOFTMAX
    with pytest.raises(ValueError, match="relu is not a valid ScoringFunc"):
        ScoringFunc.from_str("relu")


@each_ground
@each_scoring
@pytest.mark.parametrize("compiled", [False, True])
def test_gate_trains(scoring: str, compiled: bool, ground: tuple[str, str]) -> None:
    """Weights of the gate have the gradient of plain PyTorch; masked tokens and choices none."""
    backend, device = ground
    torch.manual_seed(3)
    logits = torch.randn(7, 32, device=device, requires_grad=True)
    bias = torch.randn(32, device=device)
    mask = torch.arange(7, device=device) < 5
    chosen = torch.zeros(7, 4, dtype=torch.int64, device=device)
    grad = torch.randn(7, 4, device=device)

    def gate(logits: torch.Tensor) -> tuple[Any, ...]:
        return tile_kernels.moe.top2_sum_gate(
            logits, bias, 4, 2, 4, *PLAIN, scoring, mask=mask, unmapped_topk_idx=chosen
        )

    run = torch.compile(gate, fullgraph=True, backend="aot_eager") if compiled else gate
    torch._dynamo.reset()
    with tile_kernels.backend(backend):
        idx, weights = run(logits)
        weights.backward(grad)
    assert not idx.requires_grad
    plain = logits.detach().clone().requires_grad_()
    expected = references.topk_weights(plain, chosen, scoring, 1.5)
    expected.backward(grad * mask[:, None])
    assert torch.equal(idx[:5], chosen[:5])
    torch.testing.assert_close(weights[:5], expected[:5].detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-4, atol=1e-6)
    assert logits.grad is not None
    assert not logits.grad[5:].any()


# ---- behaviour ----------------------------------------------------------------------------------


@each_ground
@pytest.mark.parametrize(("experts", "topk"), [(72, 6), (16, 6), (256, 8), (1030, 8)])
def test_ties_go_to_the_smaller_index(experts: int, topk: int, ground: tuple[str, str]) -> None:
    backend, device = ground
    logits, bias = torch.zeros(9, experts, device=device), torch.zeros(experts, device=device)
    with tile_kernels.backend(backend):
        idx, weights = tile_kernels.moe.top2_sum_gate(logits, bias, topk, 0, 0, *PLAIN, "sigmoid")
    assert torch.equal(idx.cpu(), torch.arange(topk).expand(9, topk))
    torch.testing.assert_close(weights.cpu(), torch.full((9, topk), 1.5 / topk))


@each_ground
@each_scoring
def test_nan_rows_choose_distinct_experts(scoring: str, ground: tuple[str, str]) -> None:
    backend, device = ground
    logits = torch.full((4, 48), float("nan"), device=device)
    logits[1, 7:] = 0
    logits[2] = float("-inf")
    logits[3] = float("inf")
    bias = torch.zeros(48, device=device)
    with tile_kernels.backend(backend):
        idx, weights = tile_kernels.moe.top2_sum_gate(logits, bias, 6, 2, 4, *PLAIN, scoring)
    assert all(len(set(row)) == 6 and min(row) >= 0 and max(row) < 48 for row in idx.tolist())
    assert weights[:2].isnan().all()


def test_replicas_of_late_tokens_do_not_wrap() -> None:
    """Token 100000 has 23333 * 100000 > 2^31: the turn is counted in 64 bits."""
    num_tokens = 100_001
    logits = torch.zeros(num_tokens, 2)
    physical = torch.tensor([[0, 2, 3], [1, 1, 1]], dtype=torch.int32)
    count = torch.tensor([3, 1], dtype=torch.int32)
    idx, _ = tile_kernels.moe.top2_sum_gate(
        logits, torch.zeros(2), 1, 0, 0, False, 0, 1.0, 5, 1, 0, 1, "sigmoid",
        to_physical_map=physical, logical_count=count,
    )  # fmt: skip
    turn = (5 + 23333 * (num_tokens - 1)) % 3
    assert idx[-1].item() == physical[0, turn].item()


def test_without_gradients_nothing_is_recorded() -> None:
    logits = torch.zeros(3, 8, requires_grad=True)
    with torch.no_grad():
        _, weights = tile_kernels.moe.top2_sum_gate(
            logits, torch.zeros(8), 2, 0, 0, *PLAIN, "sigmoid"
        )
    assert not weights.requires_grad


def test_forward_mode_is_refused_in_words() -> None:
    logits, bias = torch.zeros(2, 8), torch.zeros(8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits, torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="top2_sum_gate: forward-mode"):
            tile_kernels.moe.top2_sum_gate(dual, bias, 2, 0, 0, *PLAIN, "sigmoid")


def test_checked_mode_ignores_what_is_not_read() -> None:
    """Masked tokens' choices and places beyond an expert's replicas."""
    logits, bias = torch.zeros(2, 2), torch.zeros(2)
    physical = torch.tensor([[0, 99], [1, 99]], dtype=torch.int32)
    arguments = {
        "mask": torch.tensor([True, False]),
        "fix_routing_mask": torch.tensor([True, True]),
        "unmapped_topk_idx": torch.tensor([[1], [0]]),
        "to_physical_map": physical,
        "logical_count": torch.ones(2, dtype=torch.int32),
    }
    with tile_kernels.checked():
        for _ in range(2):  # the first call writes -1 for the masked token
            tile_kernels.moe.top2_sum_gate(logits, bias, 1, 0, 0, *PLAIN, "sigmoid", **arguments)


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_tokens_without_experts_have_no_gradient(value: float, scoring_func: str) -> None:
    """Whatever their logits are: padding may hold anything."""
    logits = torch.tensor([[0.0, 1, 2, 3], [value, 0, 0, 0]], requires_grad=True)
    _, weights = tile_kernels.moe.top2_sum_gate(
        logits, torch.zeros(4), 2, 0, 0, False, 0, 1.0, 0, 1, 0, 1, scoring_func,
        mask=torch.tensor([True, False]),
    )  # fmt: skip
    weights[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].any()
    assert torch.equal(logits.grad[1], torch.zeros(4))
