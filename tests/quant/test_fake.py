"""Fake quantisation: the value of a cast and back, the gradient of neither."""

from __future__ import annotations

import pytest
import torch

from tile_kernels import quant
from tile_kernels.quant.per_token_cast_to_e5m6_kernel import per_token_cast_to_e5m6


@pytest.mark.parametrize(("fmt", "group"), [("e4m3", 32), ("e2m1", 32), ("e5m6", 96)])
@pytest.mark.parametrize("round_sf", [False, True])
def test_it_is_a_cast_and_back(fmt: str, group: int, round_sf: bool) -> None:
    x = torch.randn(7, 96)
    special = {"x_special_fmt": "e5m6"} if fmt == "e5m6" else {}
    quantised = quant.per_token_cast(x, fmt, group, round_sf=round_sf)
    expected = quant.per_token_cast_back(quantised, "fp32", group, **special)
    assert torch.equal(quant.fake_cast(x, fmt, group, round_sf), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_passes_straight_through(compiled: bool) -> None:
    x = torch.randn(5, 64, requires_grad=True)
    grad = torch.randn(5, 64)

    def fake(x: torch.Tensor) -> torch.Tensor:
        return quant.fake_cast(x, "e2m1", 32)

    torch._dynamo.reset()
    run = torch.compile(fake, fullgraph=True, backend="aot_eager") if compiled else fake
    run(x).backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, grad)


def test_idempotent_with_powers_of_two() -> None:
    once = quant.fake_cast(torch.randn(9, 128), "e4m3", 64, True)
    assert torch.equal(quant.fake_cast(once, "e4m3", 64, True), once)


def test_e5m6_by_its_own_name() -> None:
    x = torch.randn(3, 64)
    for one, other in zip(per_token_cast_to_e5m6(x, 64), quant.per_token_cast(x, "e5m6", 64)):
        assert torch.equal(one, other)
