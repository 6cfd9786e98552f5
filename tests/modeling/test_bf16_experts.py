"""Experts in bfloat16 and float32 as one function, against the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tile_kernels
from tests.modeling.test_fp8_experts import NAMES, formula, problem, with_gradients
from tile_kernels.modeling import bf16_experts as module
from tile_kernels.modeling.bf16_experts import bf16_experts, bf16_experts_of_rows, map_rows
from tile_kernels.modeling.moe import MoELayer

# PyTorch has grouped products for CPUs too, which the layer does not choose by itself.
PLACES = [
    ("cpu", "loop"),
    ("cpu", "grouped_mm"),
    pytest.param("cuda", "loop", marks=pytest.mark.gpu),
    ("cpu", "m_grouped"),
    pytest.param("cuda", "grouped_mm", marks=pytest.mark.gpu),
    pytest.param("cuda", "m_grouped", marks=pytest.mark.gpu),
]


@pytest.fixture
def allow_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grouped_mm_is_available", "m_grouped_is_available"):
        monkeypatch.setattr(module, name, lambda x: x.dtype == torch.bfloat16)


def of_engine(engine: str) -> Any:
    return lambda *tensors: bf16_experts(*tensors, engine=engine)


@pytest.mark.usefixtures("allow_grouped_mm", "plain_matrix_products")
@pytest.mark.parametrize(("device", "engine"), PLACES)
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_bfloat16_is_near_the_formula(num_tokens: int, device: str, engine: str) -> None:
    """Every step is rounded to bfloat16, 2^-9 at most; there are a few in a row."""
    leaves, topk_idx = problem(num_tokens, device=device)
    found = with_gradients(of_engine(engine), leaves, topk_idx)
    exact = with_gradients(
        formula, [x.detach().double().requires_grad_() for x in leaves], topk_idx
    )
    for name, one, other in zip(NAMES, found, exact):
        assert one.shape == other.shape
        bound = 0.05 if num_tokens == 1 else 0.01  # single sums with terms of both signs
        assert (one.double() - other).norm() <= bound * other.norm(), name
    assert not found[3][-1].any()  # the expert without tokens
    assert not found[4][-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_the_formula(dtype: torch.dtype) -> None:
    leaves, topk_idx = problem(60)
    x, weights, w_in, w_out = (leaf.detach() for leaf in leaves)
    leaves = [x.to(dtype), weights, w_in.to(dtype), w_out.to(dtype)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    found = with_gradients(bf16_experts, leaves, topk_idx)
    exact = with_gradients(
        formula, [leaf.detach().double().requires_grad_() for leaf in leaves], topk_idx
    )
    for one, other in zip(found, exact):
        bound = 1e-5 if dtype == torch.float32 else 2e-3
        assert (one.double() - other).norm() <= bound * other.norm()


def test_clamp_value() -> None:
    """Gate and value are limited, and have no gradient beyond."""
    leaves, topk_idx = problem(60)
    leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    found = with_gradients(lambda *given: bf16_experts(*given, clamp_value=0.3), leaves, topk_idx)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def clamped(
        x: Tensor, weights: Tensor, topk_idx: Tensor, w_in: Tensor, w_out: Tensor
    ) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(len(w_in)):
            gate, value = (x @ w_in[expert].t()).chunk(2, dim=1)
            act = F.silu(gate.clamp(max=0.3)) * value.clamp(-0.3, 0.3)
            weight = (weights * (topk_idx == expert)).sum(1, keepdim=True)
            total = total + weight * (act @ w_out[expert].t())
        return total

    for one, other in zip(found, with_gradients(clamped, exact, topk_idx), strict=True):
        assert (one.double() - other).norm() <= 1e-5 * other.norm()


def test_kernels_and_references_agree() -> None:
    leaves, topk_idx = problem(6)
    leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = with_gradients(bf16_experts, leaves, topk_idx)
    with tile_kernels.backend("emulate"):
        found = with_gradients(bf16_experts, leaves, topk_idx)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("allow_grouped_mm")
@pytest.mark.parametrize("engine", ["loop", "grouped_mm"])
def test_rows_in_place_have_the_results_of_tokens(engine: str) -> None:
    """The same rows, given expanded with their weights."""
    leaves, topk_idx = problem(50)
    x, weights, w_in, w_out = leaves
    y = bf16_experts(x, weights, topk_idx, w_in, w_out, engine)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (w_in, w_out), grad)
    rows, groups = map_rows(topk_idx, len(w_in), on_device=False)
    slots, position = rows.pos_to_token_topk, rows.token_topk_to_pos
    assert slots is not None
    assert position is not None
    row_weights = torch.where(slots < 0, 0.0, weights.detach().flatten()[slots.clamp(min=0)])
    counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=len(w_in))
    last = torch.cat((groups.ends.new_zeros(1), groups.ends))[:-1] + counts.int()
    of_rows = bf16_experts_of_rows(
        rows.expand(x.detach()), row_weights, last, groups.counts or [], w_in, w_out, engine
    )
    assert torch.equal(rows.reduce(of_rows), y)
    found = torch.autograd.grad(of_rows, (w_in, w_out), rows.expand(grad))
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


def test_gradients_of_weights_are_added_to_main_grad() -> None:
    leaves, topk_idx = problem(128)
    expected = with_gradients(bf16_experts, leaves, topk_idx)
    x, weights, w_in, w_out = leaves
    for weight in (w_in, w_out):
        weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    y = bf16_experts(x, weights, topk_idx, w_in, w_out)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16())
    assert w_in.grad is None
    assert w_out.grad is None
    for weight, found in ((w_in, expected[3]), (w_out, expected[4])):
        torch.testing.assert_close(weight.main_grad - 1, found.float(), rtol=1e-5, atol=1e-5)


def test_keeps_the_first_product_alone() -> None:
    """What autograd keeps: the input, the weights, one product, and the maps."""
    leaves, topk_idx = problem(64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        bf16_experts(leaves[0], leaves[1], topk_idx, leaves[2], leaves[3])
    of_rows = [x for x in kept if x.is_floating_point() and x.dim() == 2 and len(x) > 64]
    assert [x.shape[1] for x in of_rows] == [256]


def test_backward_twice_and_second_derivatives() -> None:
    leaves, topk_idx = problem(16)
    x, weights, w_in, w_out = leaves
    y = bf16_experts(x, weights, topk_idx, w_in, w_out)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first, second)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_frozen_weights_have_no_gradient() -> None:
    leaves, topk_idx = problem(16)
    x, weights, w_in, w_out = leaves
    bf16_experts(x, weights, topk_idx, w_in.detach(), w_out.detach()).sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_runs_on_meta_tensors() -> None:
    with torch.device("meta"):
        layer = MoELayer(256, 128, 8, 2, dtype=torch.bfloat16, num_shared_experts=1)
        x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
    assert layer.w_in.grad is not None
    assert layer.w_in.grad.shape == layer.w_in.shape


@pytest.mark.slow
@pytest.mark.usefixtures("allow_grouped_mm")
def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = MoELayer(128, 128, 4, 2, dtype=torch.bfloat16, num_shared_experts=1)
    x = torch.randn(32, 128).bfloat16()
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    assert layer.w_in.grad is not None


@pytest.mark.gpu
def test_no_host_wait() -> None:
    layer = MoELayer(256, 128, 8, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("allow_grouped_mm")
def test_engine_is_chosen_by_rows_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    product = module.gemm.m_grouped_bf16_gemm_nt_contiguous
    monkeypatch.setattr(
        module.gemm, "m_grouped_bf16_gemm_nt_contiguous",
        lambda *args: called.append(len(args[0])) or product(*args),
    )  # fmt: skip
    leaves, topk_idx = problem(512)
    num_experts = len(leaves[2])
    few = 128 * num_experts // topk_idx.shape[1] - 1
    x, weights, w_in, w_out = leaves
    bf16_experts(x, weights, topk_idx, w_in, w_out)
    with torch.no_grad():
        bf16_experts(x[:few], weights[:few], topk_idx[:few], w_in, w_out)
        assert called == []
        found = bf16_experts(x, weights, topk_idx, w_in, w_out)
        assert len(called) == 2
        expected = bf16_experts(x, weights, topk_idx, w_in, w_out, "loop")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_engines_that_are_not_available() -> None:
    leaves, topk_idx = problem(4)
    for engine in ("grouped_mm", "m_grouped"):
        with pytest.raises(ValueError, match=f"engine {engine} needs bfloat16"):
            bf16_experts(leaves[0], leaves[1], topk_idx, leaves[2], leaves[3], engine)
