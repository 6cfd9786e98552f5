"""`topk_weights` and `normalize_weight`: gradients, limits, the reference grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.moe.helpers import each_grid_point, labels_of
from tests.requirements import GROUNDS
from tile_kernels import torch as references
from tile_kernels.testing.generator import generate_topk_idx
from tile_kernels.testing.numeric import assert_equal

SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
each_scoring = pytest.mark.parametrize("scoring", SCORING)
each_ground = pytest.mark.parametrize("ground", GROUNDS)


# ---- gradients ----------------------------------------------------------------------------------


@each_scoring
def test_gradcheck_of_the_reference(scoring: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(-1, 9, (5, 4))

    def weights(logits: torch.Tensor) -> torch.Tensor:
        return references.topk_weights(logits, chosen, scoring, 2.5)

    assert torch.autograd.gradcheck(weights, (logits,))


@each_scoring
def test_backward_formula_is_the_references_gradient(scoring: str) -> None:
    torch.manual_seed(2)
    logits = (4 * torch.randn(6, 11, dtype=torch.float64)).requires_grad_()
    chosen = torch.randint(-2, 13, (6, 5))
    grad_weights = torch.randn(6, 5, dtype=torch.float64)
    weights = references.topk_weights(logits, chosen, scoring, 1.5)
    (expected,) = torch.autograd.grad(weights, logits, grad_weights)
    result = references.topk_weights_backward(grad_weights, logits.detach(), chosen, scoring, 1.5)
    torch.testing.assert_close(result, expected)


def test_worked_gradient() -> None:
    logits = torch.tensor([[0, 1, 2, -1, 0.5, -0.5], [3, -2, 0, 1, -1, 2], [1.0, 1, 1, 1, 1, 1]])
    logits.requires_grad_()
    chosen = torch.tensor([[2, 5], [4, 1], [1, 1]])
    weights = tile_kernels.moe.topk_weights(logits, chosen, "sqrtsoftplus", 1.5)
    weights.backward(torch.tensor([[1.0, 0.0], [0.5, -1.0], [1.0, 2.0]]))
    expected = torch.zeros(3, 6)
    expected[0, 2], expected[0, 5] = 0.0676626, -0.1301189
    expected[1, 1], expected[1, 4] = -0.2511044, 0.2295489
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-7)


def test_sqrtsoftplus_far_below_zero_has_its_limit() -> None:
    logits = torch.tensor([[-90.0, -95.0, 0.0]], requires_grad=True)
    chosen = torch.tensor([[0, 1]])
    weights = tile_kernels.moe.topk_weights(logits, chosen, "sqrtsoftplus")
    weights.backward(torch.tensor([[1.0, 0.0]]))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    # Scores are exp(x / 2): d/dx0 of s0 / (1e-20 + s0 + s1).
    s0, s1 = (torch.exp(logits.detach()[0, :2].double() / 2)).unbind()
    total = 1e-20 + s0 + s1
    expected = ((total - s0) / total**2 * s0 / 2).float()
    torch.testing.assert_close(logits.grad[0, 0], expected, rtol=1e-3, atol=0.0)


@each_ground
def test_no_expert_weighs_nothing_even_beside_nan(ground: tuple[str, str]) -> None:
    backend, device = ground
    logits = torch.tensor([[float("nan"), 0.0]], device=device)
    chosen = torch.tensor([[0, -1]], device=device)
    with tile_kernels.backend(backend):
        weights = tile_kernels.moe.topk_weights(logits, chosen)
    assert weights[0, 0].isnan()
    assert weights[0, 1] == 0


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
@pytest.mark.benchmark
@each_grid_point
def test_normalize_weight_benchmark(params: dict[str, int], record_time: Any) -> None:
    weights = weights_of(params)
    record_time(tile_kernels.moe.normalize_weight, labels_of(params, weights), weights)


# ---- properties ---------------------------------------------------------------------------------


def test_gradient_is_that_of_the_reference() -> None:
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
