"""The router's products by bfloat16 parts, against float64 and against PyTorch's in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels.modeling import router as module
from tile_kernels.modeling.moe import MoELayer
from tile_kernels.modeling.router import (
    routed,
    routed_with_gradients,
    split_gradients,
    split_logits,
    split_router,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = (2, 0, 0, 1.5, "sigmoid")


@pytest.fixture
def allow_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "splits_are_available", lambda x, *_: x.dtype == torch.bfloat16)


def problem(
    device: str, num_tokens: int = 96, hidden: int = 1024, num_experts: int = 16, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a router's weights, and gradients of its logits, of different magnitudes by row."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden).bfloat16()
    router = torch.randn(num_experts, hidden) * torch.logspace(-3, 3, num_experts)[:, None] * scale
    grad = torch.randn(num_tokens, num_experts) * torch.logspace(-6, 0, num_tokens)[:, None]
    return x.to(device), router.to(device), grad.to(device)


def error(found: Tensor, exact: Tensor, dim: int) -> Tensor:
    """Of each row or column: the norm of the difference, relative to the norm."""
    return (found.double() - exact).norm(dim=dim) / exact.norm(dim=dim)


@pytest.mark.usefixtures("plain_matrix_products")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_sums_are_those_of_float32(scale: float, device: str) -> None:
    """Parts are exact, so what is left is the error of sums: on tensor cores, which truncate, some
    bits more than PyTorch's; with bfloat16 weights it would be 1e-3."""
    x, router, grad = problem(device, scale=scale)
    exact = x.double() @ router.double().t()
    logits = split_logits(x, split_router(router))
    exact_router = grad.double().t() @ x.double()
    grad_router = split_gradients(grad, x, split_router(router))[1]
    assert grad_router is not None
    if device == "cpu":
        plain = error(x.float() @ router.t(), exact, 0)
        assert (error(logits, exact, 0) <= 2 * plain).all()
        plain = error(grad.t() @ x.float(), exact_router, 1)
        assert (error(grad_router, exact_router, 1) <= 2 * plain).all()
    assert (error(logits, exact, 0) <= 2e-5).all()
    assert (error(grad_router, exact_router, 1) <= 2e-5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_of_tokens_is_rounded_once(device: str) -> None:
    x, router, grad = problem(device)
    exact = grad.double() @ router.double()
    found = split_gradients(grad, x, split_router(router))[0]
    assert found is not None
    assert found.dtype == torch.bfloat16
    sizes = grad.double().abs() @ router.double().abs()
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-16 * sizes).all()
    same = found == exact.float().bfloat16()
    assert same.float().mean() > 0.99


@pytest.mark.usefixtures("allow_splits", "plain_matrix_products")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 200])
def test_is_the_router_in_float32(
    num_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, router, _ = problem(device, num_tokens, 256, 8, scale=0.01)
    bias = torch.linspace(-0.1, 0.1, 8, device=device)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), router.clone().requires_grad_()]
        logits, topk_idx, weights = routed_with_gradients(*leaves, bias, *SETTINGS)
        loss = (
            weights * torch.tensor([1.0, -2.0], device=device)
        ).sum() + 1e-3 * logits.square().sum()
        return [logits, weights, *torch.autograd.grad(loss, leaves), topk_idx]

    found = run()
    assert torch.equal(found[-1], routed(x, router, bias, *SETTINGS)[1])
    monkeypatch.setattr(module, "splits_are_available", lambda *_: False)
    expected = run()
    assert torch.equal(found[-1], expected[-1])
    for one, other in zip(found[:-1], expected[:-1]):
        assert one.dtype == other.dtype
        bound = 2e-5 if one.dtype == torch.float32 else 2**-8
        assert (one - other).float().norm() <= bound * other.float().norm()


def test_kernels_and_references_agree() -> None:
    x, router, grad = problem("cpu", 5, 64, 8)

    def run() -> tuple[Tensor | None, ...]:
        parts = split_router(router)
        return split_logits(x, parts), *split_gradients(grad, x, parts)

    expected = run()
    with tile_kernels.backend("emulate", arch="sm_90a"):
        found = run()
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_logits_do_not_depend_on_other_tokens() -> None:
    x, router, _ = problem("cuda", 5000, 1024, 64)
    parts = split_router(router)
    logits = split_logits(x, parts)
    for first, last in ((0, 1), (17, 120), (1000, 4000)):
        assert torch.equal(split_logits(x[first:last], parts), logits[first:last])


@pytest.mark.gpu
def test_tokens_at_any_address() -> None:
    layer = MoELayer(64, 64, 8, 2, device="cuda", dtype=torch.bfloat16)
    flat = torch.randn(3 * 64 + 1, device="cuda").bfloat16()
    x = flat[1:].view(3, 64)
    torch.testing.assert_close(layer.route(x)[1], layer.route(x.clone())[1], rtol=1e-4, atol=1e-5)


def test_meta_tensors_and_other_sizes() -> None:
    """Meta tensors take the path of a Hopper GPU; sizes that tensor cores cannot take do not."""
    for num_experts in (8, 6):
        layer = MoELayer(64, 32, num_experts, 2, device="meta", dtype=torch.bfloat16)
        x = torch.empty(3, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        assert module.splits_are_available(x, layer.router) == (num_experts == 8)
        layer(x).sum().backward()
        assert x.grad is not None
        assert layer.router.grad is not None
        assert layer.router.grad.dtype == torch.float32
    assert not module.splits_are_available(torch.empty(3, 64).bfloat16(), torch.empty(8, 64))
