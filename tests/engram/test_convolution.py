"""The convolution behind the gate: texts, dilation, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.examples.small import distance
from tile_kernels.engram import engram_convolution_bwd, engram_convolution_fwd
from tile_kernels.engram.convolution.plan import CHUNK, num_parts
from tile_kernels.modeling.engram.convolution import CausalConvolution

GROUNDS = ["torch", pytest.param("emulate", marks=pytest.mark.emulated)]


def layer_of(streams: int, hidden: int, dilation: int) -> CausalConvolution:
    torch.manual_seed(0)
    layer = CausalConvolution(streams, hidden, 4, dilation)
    torch.nn.init.normal_(layer.taps)
    torch.nn.init.normal_(layer.norm_weight, 1, 0.1)
    return layer


def gradients(layer: CausalConvolution, y: Tensor, *more: Tensor | None) -> list[Tensor]:
    given = y.clone().requires_grad_()
    out = layer(given, *more)
    torch.manual_seed(1)
    inputs = [given, *layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn_like(out))]


@pytest.mark.parametrize("backend", GROUNDS)
@pytest.mark.parametrize("documents", [False, True])
def test_operator_is_the_composition(backend: str, documents: bool) -> None:
    """bfloat16 by the operator against float32 by PyTorch's operations and autograd."""
    layer = layer_of(2, 24, 3)
    y = torch.randn(2, 41, 2, 24).bfloat16()
    bounds = torch.tensor([0, 17, 30, 60, 82]) if documents else None
    residual = torch.randn_like(y)
    with tile_kernels.backend(backend):
        found = gradients(layer, y, bounds, residual)
    expected = gradients(layer, y.float(), bounds, residual.float())
    for one, other in zip(expected, found):
        assert one.shape == other.shape
        assert distance(one, other.float()) < 5e-3


def test_texts_do_not_see_each_other() -> None:
    """A change in the first text leaves the second one's bits."""
    torch.manual_seed(0)
    y, taps = torch.randn(20, 1, 8).bfloat16(), torch.randn(3, 1, 8)
    starts = torch.tensor([0] * 9 + [9] * 11, dtype=torch.int32)
    first, _ = engram_convolution_fwd(y, taps[0], taps, starts, 2, 1e-6)
    y[:9] += 1
    second, _ = engram_convolution_fwd(y, taps[0], taps, starts, 2, 1e-6)
    assert torch.equal(first[9:], second[9:])
    assert not torch.equal(first[:9], second[:9])


def test_parts_cover_all_tokens() -> None:
    """The sum over parts does not depend on how tokens are divided."""
    torch.manual_seed(0)
    tokens = 2 * CHUNK * 3 + 5
    y, grad = (torch.randn(tokens, 1, 8).bfloat16() for _ in range(2))
    taps, starts = torch.randn(4, 1, 8), torch.zeros(tokens, dtype=torch.int32)
    _, rstd = engram_convolution_fwd(y, taps[0], taps, starts, 3, 1e-6)
    _, partial = engram_convolution_bwd(grad, y, rstd, taps[0], taps, starts, 3)
    assert partial.shape[0] == num_parts(tokens, 3) == 9
    exact_y = y.double().requires_grad_()
    exact_taps = taps.double().requires_grad_()
    normed = exact_y * rstd[..., None] * taps[0]
    total = sum(
        torch.cat((normed.new_zeros(3 * j, 1, 8), normed[: tokens - 3 * j])) * exact_taps[j]
        for j in range(4)
    )
    torch.nn.functional.silu(total).backward(grad.double())
    assert exact_taps.grad is not None
    assert distance(exact_taps.grad, partial.sum(0)[:4].double()) < 1e-5


def test_no_second_derivative() -> None:
    layer = layer_of(1, 8, 1)
    y = torch.randn(4, 1, 8).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(layer(y).sum(), y, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
