"""The hash gate: its gradient, duplicates, tokens without experts."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import torch as references
from tile_kernels.moe.hash.cases import LOGITS, TABLE

SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
each_scoring = pytest.mark.parametrize("scoring", SCORING)
each_ground = pytest.mark.parametrize("ground", GROUNDS)


@each_ground
@pytest.mark.parametrize("compiled", [False, True])
def test_worked_gradient(compiled: bool, ground: tuple[str, str]) -> None:
    backend, device = ground
    logits = torch.tensor(LOGITS, device=device, requires_grad=True)
    ids, table = torch.tensor([1, 2, 3], device=device), torch.tensor(TABLE, device=device)

    def gate(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tile_kernels.moe.hash_gate(logits, ids, table, 1.5)

    torch._dynamo.reset()
    run = torch.compile(gate, fullgraph=True, backend="aot_eager") if compiled else gate
    with tile_kernels.backend(backend):
        idx, weights = run(logits)
        weights.backward(torch.tensor([[1.0, 0.0], [0.5, -1.0], [1.0, 2.0]], device=device))
    assert not idx.requires_grad
    expected = torch.zeros(3, 6)
    expected[0, 2], expected[0, 5] = 0.0676626, -0.1301189
    expected[1, 1], expected[1, 4] = -0.2511044, 0.2295489
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.cpu(), expected, rtol=1e-5, atol=1e-7)


@each_scoring
def test_gradcheck_of_the_reference(scoring: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    ids, table = torch.randint(-1, 9, (6,)), torch.randint(-1, 5, (8, 4))
    mask = torch.arange(6) != 2

    def weights(logits: torch.Tensor) -> torch.Tensor:
        return references.hash_gate(logits, ids, table, 2.5, scoring, mask)[1]

    assert torch.autograd.gradcheck(weights, (logits,))


@each_ground
@each_scoring
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_the_references(
    dtype: torch.dtype, scoring: str, ground: tuple[str, str]
) -> None:
    """With duplicates, masked tokens, unknown ids, slots without expert and shared experts."""
    backend, device = ground
    torch.manual_seed(2)
    logits = torch.randn(9, 12).to(dtype)
    ids, table = torch.randint(-1, 9, (9,)), torch.randint(-1, 4, (8, 6))
    mask, grad = torch.arange(9) != 4, torch.randn(9, 7)
    rest = {
        "num_shared_experts": 1,
        "to_physical_map": torch.arange(26).view(13, 2).int(),
        "logical_count": torch.ones(13, dtype=torch.int32),
    }
    plain = logits.double().requires_grad_()
    references.hash_gate(plain, ids, table, 2.5, scoring, mask, **rest)[1].backward(grad.double())
    moved = logits.to(device).requires_grad_()
    given = [x.to(device) for x in (ids, table)]
    rest = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in rest.items()}
    with tile_kernels.backend(backend):
        _, weights = tile_kernels.moe.hash_gate(
            moved, *given, 2.5, scoring, mask.to(device), **rest
        )
        weights.backward(grad.to(device))
    assert moved.grad is not None
    assert plain.grad is not None
    assert moved.grad.dtype is dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {}
    torch.testing.assert_close(moved.grad.cpu(), plain.grad.to(dtype), **tolerance)
    assert not moved.grad[4].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradient_of_duplicates_is_deterministic(device: str) -> None:
    logits = torch.randn(4000, 8, device=device, requires_grad=True)
    ids = torch.arange(4000, device=device) % 5
    table = torch.randint(2, (5, 32), device=device)  # sixteen of one expert or so
    grad = torch.randn(4000, 32, device=device)
    _, weights = tile_kernels.moe.hash_gate(logits, ids, table)
    (first,) = torch.autograd.grad(weights, logits, grad, retain_graph=True)
    for _ in range(3):
        (again,) = torch.autograd.grad(weights, logits, grad, retain_graph=True)
        assert torch.equal(first, again)


def test_far_below_zero_the_gradient_is_the_limit() -> None:
    logits = torch.tensor([[-90.0, -95.0, 0.0]], requires_grad=True)
    table = torch.tensor([[0, 1]])
    _, weights = tile_kernels.moe.hash_gate(logits, torch.tensor([0]), table)
    weights.backward(torch.tensor([[1.0, 0.0]]))
    s0, s1 = torch.exp(torch.tensor([-45.0, -47.5], dtype=torch.float64)).unbind()
    total = 1e-20 + s0 + s1
    expected = ((total - s0) / total**2 * s0 / 2).float()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0, 0], expected, rtol=1e-3, atol=0.0)
    assert logits.grad[0, 2] == 0


def test_masked_ids_are_not_looked_at() -> None:
    ids = torch.tensor([0, 10**12])
    table = torch.tensor([[1]])
    mask = torch.tensor([True, False])
    with tile_kernels.checked():
        idx, _ = tile_kernels.moe.hash_gate(torch.zeros(2, 2), ids, table, mask=mask)
    assert idx.tolist() == [[1], [-1]]
