"""Inputs and comparisons that tests of several mHC operators use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.requirements import GROUNDS

F64 = torch.float64
sizes = pytest.mark.parametrize("m", range(1, 9))


def close(found: Tensor, *expected: float, atol: float = 2e-7) -> None:
    """To the digits that the examples give."""
    torch.testing.assert_close(
        found.flatten().float(), torch.tensor(expected), rtol=3e-7, atol=atol
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


STREAMS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """By autograd."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*inputs), inputs, grad))


def assert_gradients(found: tuple[Tensor, ...] | list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


BF16 = torch.bfloat16
ON_CPU = ("emulate", "cpu")
ON_GPU = ("tilelang", "cuda")


def grounds(small: list[Any], large: list[Any]) -> list[Any]:
    return [
        *(pytest.param(*ON_CPU, *x, id=f"emulate-{x}") for x in small),
        *(pytest.param(*ON_GPU, *x, id=f"cuda-{x}", marks=pytest.mark.gpu) for x in large),
    ]


def sublayer(n: int, m: int, h: int, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    count = m * (m + 2)
    residual = torch.randn(1, n, m, h, device=device).to(BF16)
    fn = (0.5 / (m * h)) ** 0.5 * torch.randn(count, m * h, device=device)
    return residual, fn, torch.randn(3, device=device), torch.randn(count, device=device)


each_ground = pytest.mark.parametrize("ground", GROUNDS)


def leaf(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


KERNELS = GROUNDS[1:]
each_kernel = pytest.mark.parametrize("ground", KERNELS)
