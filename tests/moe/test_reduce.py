"""Reducing the fused layout: order of the sum, gradients, the reference grid."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.moe.helpers import (
    each_backend,
    each_grid_point_and_hidden,
    mapped,
    reduced_plainly,
    routed,
)
from tile_kernels.testing.numeric import assert_equal


@each_backend
def test_reduce_undoes_expand(backend: str) -> None:
    """Small integers, so that every sum is exact: each token comes back once per valid slot."""
    slots, experts = routed()
    x = torch.randint(-9, 9, (21, 40)).float()
    with tile_kernels.backend(backend):
        expanded = tile_kernels.moe.expand_to_fused(x, slots, experts)
        reduced = tile_kernels.moe.reduce_fused(expanded, None, slots)
    assert_equal(reduced, x * (slots >= 0).sum(1, keepdim=True) + 0.0)
    assert not expanded[experts < 0].any()


@each_backend
def test_order_of_slots_is_the_order_of_the_sum(backend: str) -> None:
    """`1e8 - 1e8 + 1` is 1, `1 + 1e8 - 1e8` is 0."""
    x = torch.tensor([[1e8], [-1e8], [1.0]])
    slots = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32)
    with tile_kernels.backend(backend):
        assert tile_kernels.moe.reduce_fused(x, None, slots).tolist() == [[1.0], [0.0]]


@each_backend
def test_negative_zero_and_saturation(backend: str) -> None:
    """Without slots the sum is `0 * sf`; e4m3 ends at 448, and NaN stays."""
    x = torch.tensor([[1e9, -1e9, math.nan, -0.0]])
    slots = torch.tensor([[-1], [0]], dtype=torch.int32)
    with tile_kernels.backend(backend):
        result = tile_kernels.moe.reduce_fused(x, None, slots, "e4m3", torch.tensor([-1.0]))
        assert result.view(torch.uint8).tolist() == [[0x80] * 4, [0xFE, 0x7E, 0x7F, 0x80]]
        # -0.0 is added to +0.0: the sum is +0.0, unlike a plain product
        assert tile_kernels.moe.reduce_fused(x, None, slots)[1].signbit().tolist()[3] is False


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("weighted", "scaled"), [*itertools.product([False, True], repeat=2)])
def test_gradient_of_reduce(weighted: bool, scaled: bool, compiled: bool) -> None:
    slots, experts = routed()
    num_positions = experts.shape[0]
    x, x_sf = torch.randn(num_positions, 10), torch.randn(num_positions)
    weights, upstream = torch.rand(slots.shape), torch.randn(slots.shape[0], 10)

    def reduce(x: Tensor, weights: Tensor | None, slots: Tensor, x_sf: Tensor | None) -> Tensor:
        pair = x if x_sf is None else (x, x_sf)
        return tile_kernels.moe.reduce_fused(pair, weights, slots)

    if compiled:
        torch._dynamo.reset()
        reduce = torch.compile(reduce, fullgraph=True, backend="aot_eager")
    grads = []
    for function, dtype in ((reduce, torch.float32), (reduced_plainly, torch.float64)):
        leaves = [x, *([weights] if weighted else []), *([x_sf] if scaled else [])]
        leaves = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
        arguments = [leaves[0], leaves[1] if weighted else None, slots]
        result = function(*arguments, leaves[-1] if scaled else None)
        result.backward(upstream.to(dtype))
        grads.append([leaf.grad for leaf in leaves])
    for mine, plain in zip(*grads):
        torch.testing.assert_close(mine, plain.float(), rtol=1e-5, atol=1e-5)


def test_gradient_of_a_lower_precision_result() -> None:
    """float32 rows, bfloat16 sum: the gradient comes in bfloat16 and leaves in float32."""
    slots, experts = routed()
    x = torch.randn(experts.shape[0], 8, requires_grad=True)
    weights = torch.rand(slots.shape, requires_grad=True)
    out = tile_kernels.moe.reduce_fused(x, weights, slots, out_dtype=torch.bfloat16)
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    named = slots[slots >= 0].long()
    assert_equal(x.grad[named, 0], weights.detach()[slots >= 0])
    assert not weights.grad[slots < 0].any()


def test_gradients_that_do_not_exist() -> None:
    slots, experts = routed()
    x = torch.randn(experts.shape[0], 8, requires_grad=True)
    reduce = tile_kernels.moe.reduce_fused
    with pytest.raises(TypeError, match="reduce_fused: a float8 result has no gradient"):
        reduce(x, None, slots, "e4m3").backward(torch.ones(21, 8).to(torch.float8_e4m3fn))
    codes = x.detach().to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(TypeError, match="reduce_fused: x of float8_e4m3fn has no gradient"):
        reduce(codes, None, slots, out_dtype=torch.float32).sum().backward()
    weights = torch.rand(slots.shape, requires_grad=True)
    reduce(codes.detach(), weights, slots, out_dtype=torch.float32).sum().backward()
    expected = codes.detach().float().sum(1)[slots.long().clamp(0)] * (slots >= 0)
    torch.testing.assert_close(weights.grad, expected)
    tokens = torch.randn(21, 8).to(torch.float8_e5m2).requires_grad_()
    expanded = tile_kernels.moe.expand_to_fused(tokens, slots, experts)
    with pytest.raises(TypeError, match="expand_to_fused: x of float8_e5m2 has no gradient"):
        expanded.backward(torch.zeros_like(expanded))
    with pytest.raises(ValueError, match="reduce_fused: out cannot be given with gradients"):
        reduce(x, None, slots, out=torch.empty(21, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_format", ["", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_grid_point_and_hidden
def test_reduce_on_the_grid(params: dict[str, int], dtype: torch.dtype, fp8_format: str) -> None:
    hidden = params["hidden"]
    slots, _ = mapped(params, 1)
    x: Any = torch.randn(slots.numel(), hidden, device="cuda").to(dtype)
    sf = torch.randn(1, device="cuda") if fp8_format else None
    weights = torch.rand(slots.shape, device="cuda")
    x_sf = torch.randn(slots.numel(), device="cuda")
    for arguments in ((x, weights), ((x, x_sf), weights), (x, None), ((x, x_sf), None)):
        more = (slots, fp8_format, sf)
        expected = tile_kernels.torch.reduce_fused(*arguments, *more)
        assert_equal(tile_kernels.moe.reduce_fused(*arguments, *more), expected)
