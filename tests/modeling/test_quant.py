"""SwiGLU with e4m3 activations against plain autograd."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import moe
from tile_kernels.modeling.quant import swiglu_cast
from tile_kernels.testing.numeric import calc_diff


def plain(x: torch.Tensor, weights: torch.Tensor | None, clamp: float | None) -> torch.Tensor:
    gate, value = x.float().chunk(2, dim=1)
    if clamp is not None:
        gate, value = gate.clamp(max=clamp), value.clamp(-clamp, clamp)
    y = torch.nn.functional.silu(gate) * value
    return y if weights is None else y * weights[:, None]


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("clamp", [None, 1.0])
def test_close_to_plain_autograd(ground: tuple[str, str], clamp: float | None) -> None:
    backend, device = ground
    torch.manual_seed(0)
    x = torch.randn(24, 128, device=device).bfloat16().requires_grad_()
    grad = torch.randn(24, 64, device=device)
    with tile_kernels.backend(backend):
        y, (data, scales) = swiglu_cast(x, num_per_channels=32, swiglu_clamp_value=clamp)
        y.backward(grad.bfloat16())
    assert y.shape == data.shape == (24, 64)
    assert scales.shape == (24, 2)
    same = x.detach().clone().requires_grad_()
    expected = plain(same, None, clamp)
    expected.backward(grad)
    assert calc_diff(y.detach().float(), expected.detach()) < 2e-3
    assert x.grad is not None
    assert calc_diff(x.grad.float(), same.grad.float()) < (2e-3 if clamp is None else 2e-2)


@pytest.mark.parametrize("ground", GROUNDS)
def test_weights_train_through_the_fused_layout(ground: tuple[str, str]) -> None:
    backend, device = ground
    torch.manual_seed(1)
    chosen = torch.tensor([[0, 1], [1, -1], [0, 2]], device=device)
    weights = torch.rand(3, 2, device=device, requires_grad=True)
    with tile_kernels.backend(backend):
        mapping = moe.get_fused_mapping(chosen, 3, 0, 4)
        x = torch.randn(mapping[0].shape[0], 64, device=device).bfloat16().requires_grad_()
        y, _ = swiglu_cast(x, weights, mapping[2], mapping[3], num_per_channels=32)
        y.float().square().sum().backward()
    slots = mapping[2].long()
    flat = weights.detach().flatten().clone().requires_grad_()
    rows = torch.where(slots >= 0, flat[slots.clamp(min=0)], 0)
    same = x.detach().clone().requires_grad_()
    plain(same, rows, None).square().sum().backward()
    assert weights.grad is not None
    assert weights.grad[1, 1] == 0
    assert calc_diff(weights.grad.flatten(), flat.grad) < 2e-3
    assert calc_diff(x.grad.float(), same.grad.float()) < 5e-3


def test_compiles() -> None:
    x = torch.randn(8, 128).bfloat16().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        return swiglu_cast(x, num_per_channels=32)[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    result = compiled(x)
    assert torch.equal(result, run(x))
    result.float().sum().backward()
    assert x.grad is not None


def test_words() -> None:
    x = torch.randn(4, 128).bfloat16()
    with pytest.raises(ValueError, match="swiglu_cast: num_per_channels must be 32 or 128, got 64"):
        swiglu_cast(x, num_per_channels=64)
    with pytest.raises(ValueError, match="must be given together"):
        swiglu_cast(x, torch.ones(4, 1))
