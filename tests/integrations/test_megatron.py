"""The router of Megatron-core, against its definition in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.requirements import CUDA, EMULATED_IN_FULL, TORCH
from tile_kernels.integrations import megatron


def defined(
    logits: Tensor, topk: int, pre: bool, groups: int | None, kept: int | None,
    factor: float | None, score: str, bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token, as `topk_routing_with_score_function` of Megatron-core states it."""
    probs = torch.zeros_like(logits)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    rows = []
    for row in logits:
        all_scores = row.softmax(0) if score == "softmax" else row.sigmoid()
        ranked = all_scores.detach().clone()
        if score == "softmax" and not pre:
            ranked = row.detach().clone()
        if score == "sigmoid" and bias is not None:
            ranked += bias
        if kept and groups:
            parts = ranked.view(groups, -1)
            sums = parts.sort(1, descending=True).values[:, : topk // kept].sum(1)
            lost = sums.argsort(descending=True)[kept:]
            parts[lost] = -torch.inf
        ids = ranked.argsort(descending=True)[:topk]
        weights = all_scores[ids]
        if (score == "softmax" and not pre) or (score == "sigmoid" and topk > 1):
            weights = weights / weights.sum()
        rows.append(torch.zeros_like(row).scatter(0, ids, weights * (factor or 1.0)))
        chosen[len(rows) - 1, ids] = True
    probs = torch.stack(rows)
    return probs, chosen


@pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
@pytest.mark.parametrize(
    ("topk", "pre", "groups", "kept", "factor", "score", "biased"),
    [
        (4, False, None, None, None, "softmax", False),
        (4, True, None, None, 2.5, "softmax", False),
        (4, True, 4, 2, None, "softmax", False),
        (4, False, 8, 4, 2.5, "softmax", False),
        (4, False, 4, 2, 2.5, "sigmoid", True),
        (6, False, 4, 2, None, "sigmoid", False),
        (1, False, None, None, 2.0, "sigmoid", True),
        (2, False, 4, 0, 0.0, "sigmoid", True),
    ],
)
def test_router(
    topk: int, pre: bool, groups: int | None, kept: int | None, factor: float | None, score: str,
    biased: bool, ground: tuple[str, str],
) -> None:  # fmt: skip
    backend, device = ground
    torch.manual_seed(0)
    logits = torch.randn(9, 32, dtype=torch.float64)
    bias = torch.rand(32) if biased else None
    theirs, ours = logits.clone().requires_grad_(), logits.float().to(device).requires_grad_()
    given = topk, pre, groups, kept, factor, score
    probs, chosen = defined(theirs, *given, bias)
    with tile_kernels.backend(backend):
        moved = bias if bias is None else bias.to(device)
        found, found_chosen = megatron.fused_topk_with_score_function(ours, *given, moved)
    assert torch.equal(found_chosen.cpu(), chosen)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double().cpu(), probs, rtol=1e-5, atol=1e-7)
    grad = torch.randn_like(probs)
    probs.backward(grad)
    with tile_kernels.backend(backend):
        found.backward(grad.float().to(device))
    torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_logits_of_16_bits() -> None:
    logits = torch.randn(5, 16).bfloat16()
    given = 3, False, None, None, None, "sigmoid", None
    probs, chosen = megatron.fused_topk_with_score_function(logits, *given)
    expected, same = megatron.fused_topk_with_score_function(logits.float(), *given)
    assert probs.dtype == torch.bfloat16
    assert torch.equal(probs, expected.bfloat16())
    assert torch.equal(chosen, same)
    empty = megatron.fused_topk_with_score_function(logits[:0], *given)
    assert [each.shape for each in empty] == [(0, 16), (0, 16)]


def test_mistakes_are_named() -> None:
    logits = torch.randn(2, 16)
    call = megatron.fused_topk_with_score_function
    with pytest.raises(ValueError, match="fused_topk_with_score_function: score_function must be"):
        call(logits, 2, False, None, None, None, "relu", None)
    with pytest.raises(ValueError, match="num_groups must divide 16 experts, got 3"):
        call(logits, 2, False, 3, 1, None, "sigmoid", None)
    with pytest.raises(ValueError, match="group_topk must be at most topk"):
        call(logits, 1, False, 4, 2, None, "sigmoid", None)
    with pytest.raises(ValueError, match=r"expert_bias must have shape \[16\], got"):
        call(logits, 2, False, None, None, None, "sigmoid", torch.zeros(4))
    with pytest.raises(TypeError, match="logits must be"):
        call(logits.long(), 2, False, None, None, None, "sigmoid", None)
