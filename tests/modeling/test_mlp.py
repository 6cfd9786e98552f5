"""The feed-forward layer with two input projections, against its formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.examples.small import distance
from tile_kernels.modeling.mlp import swiglu_mlp

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = ((3, 5, 64), (48, 64), (48, 64), (64, 48))


def leaves(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(shape) * (1.0 if len(shape) == 3 else 0.2) for shape in SHAPES]
    return [x.bfloat16().to(device, dtype).requires_grad_() for x in found]


def formula(x: Tensor, gate: Tensor, value: Tensor, down: Tensor, limit: float | None) -> Tensor:
    left, right = x @ gate.t(), x @ value.t()
    if limit is not None:
        left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    return (F.silu(left) * right) @ down.t()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "limit", "near"),
    [(torch.float32, None, 5e-6), (torch.float32, 0.5, 5e-6), (torch.bfloat16, None, 0.01)],
)
def test_result_and_gradients(
    dtype: torch.dtype, limit: float | None, near: float, device: str
) -> None:
    ours = leaves(dtype, device)
    exact = [x.detach().cpu().double().requires_grad_() for x in ours]
    found, expected = swiglu_mlp(*ours, limit), formula(*exact, limit)  # type: ignore[call-arg]
    direction = torch.randn(expected.shape, dtype=torch.float64).bfloat16()
    grads = torch.autograd.grad(found, ours, direction.to(device, dtype))
    wanted = torch.autograd.grad(expected, exact, direction.double())
    for one, other, like in zip((found, *grads), (expected, *wanted), (found, *ours), strict=True):
        assert one.shape == like.shape
        assert one.dtype == dtype
        assert distance(other, one.cpu().double()) < near
    with torch.no_grad():
        assert torch.equal(swiglu_mlp(*ours, limit), found)  # type: ignore[call-arg]


@pytest.mark.parametrize("trained", range(4))
def test_only_the_gradients_that_are_needed(trained: int) -> None:
    """A frozen projection costs no gradient, and changes no other."""
    whole = leaves(torch.float32)
    expected = torch.autograd.grad(swiglu_mlp(*whole).square().sum(), whole)[trained]
    some = [x.detach() for x in whole]
    some[trained].requires_grad_()
    (found,) = torch.autograd.grad(swiglu_mlp(*some).square().sum(), some[trained])
    assert torch.equal(found, expected)


def test_no_tokens() -> None:
    _, *weights = leaves(torch.float32)
    x = torch.empty(0, 64, requires_grad=True)
    y = swiglu_mlp(x, *weights)
    y.sum().backward()
    assert y.shape == (0, 64)
    assert not weights[0].grad.any()


def test_autocast() -> None:
    given = leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = swiglu_mlp(*given)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, swiglu_mlp(*(x.bfloat16() for x in given)))
    found.sum().backward()
    assert {x.grad.dtype for x in given} == {torch.float32}


def test_bad_arguments() -> None:
    x, gate, value, down = leaves(torch.float32)
    with pytest.raises(TypeError, match=r"swiglu_mlp: x must be bfloat16 or float32, got torch\.f"):
        swiglu_mlp(x.half(), gate.half(), value.half(), down.half())
    with pytest.raises(ValueError, match=r"value must have shape \(48, 64\), got \(47, 64\)"):
        swiglu_mlp(x, gate, value[:47], down)
    with pytest.raises(ValueError, match=r"down must have shape \(64, 48\), got \(48, 64\)"):
        swiglu_mlp(x, gate, value, gate)
