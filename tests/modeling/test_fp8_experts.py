"""Experts with all products in FP8, against the formula in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tile_kernels
from tile_kernels.modeling import fp8_experts as module
from tile_kernels.modeling import moe as layer_module
from tile_kernels.modeling.fp8_experts import (
    WeightCache,
    fp8_experts,
    fp8_experts_masked,
    map_masked_rows,
    quantize_weights,
)
from tile_kernels.modeling.moe import MoELayer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("y", "x", "weights", "w_in", "w_out")


def formula(x: Tensor, weights: Tensor, topk_idx: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for expert in range(len(w_in)):
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        gate, value = (x[token] @ w_in[expert].T).chunk(2, -1)
        part = (F.silu(gate) * value * weights[token, slot, None]) @ w_out[expert].T
        y = y.index_add(0, token, part)
    return y


def problem(
    num_tokens: int, num_topk: int = 2, num_experts: int = 4, device: str = "cpu"
) -> tuple[list[Tensor], Tensor]:
    """Tokens, weights and the weights of experts in bfloat16; the last expert gets no token."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device)

    scores = normal(num_tokens, num_experts)
    scores[:, -1] = -9
    topk_idx = scores.topk(num_topk).indices
    topk_idx[: num_tokens // 8, -1] = -1
    leaves = [
        normal(num_tokens, 256).bfloat16(),
        torch.rand(num_tokens, num_topk, generator=generator).to(device),
        normal(num_experts, 256, 256, std=256**-0.5).bfloat16(),
        normal(num_experts, 256, 128, std=128**-0.5).bfloat16(),
    ]
    return [x.requires_grad_() for x in leaves], topk_idx


def with_gradients(function: Any, leaves: list[Tensor], topk_idx: Tensor) -> list[Tensor]:
    x, weights, w_in, w_out = leaves
    y = function(x, weights, topk_idx, w_in, w_out)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return [y, *torch.autograd.grad(y, (x, weights, w_in, w_out), grad.bfloat16().to(y.dtype))]


@pytest.mark.parametrize("device", DEVICES)
def test_error_is_that_of_e4m3(device: str) -> None:
    """Against float64: rounding both operands of two products in a row.

    The projection on the exact result is a little below 1, because rounding to nearest shrinks the
    energy of a normal variable; one cast costs 0.0006 to 0.0009, and SwiGLU doubles what comes in.
    """
    leaves, topk_idx = problem(512, device=device)
    found = with_gradients(fp8_experts, leaves, topk_idx)
    exact = with_gradients(
        formula, [x.detach().double().requires_grad_() for x in leaves], topk_idx
    )
    for name, one, other in zip(NAMES, found, exact):
        error = (one.double() - other).norm() / other.norm()
        assert error < (0.08 if name == "y" else 0.09), name
        projection = (one.double() * other).sum() / (other * other).sum()
        assert abs(projection - 1) < 0.01, name
    assert not found[3][-1].any()  # the expert without tokens
    assert not found[4][-1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 130])
def test_few_tokens(num_tokens: int, device: str) -> None:
    leaves, topk_idx = problem(num_tokens, device=device)
    found = with_gradients(fp8_experts, leaves, topk_idx)
    exact = with_gradients(
        formula, [x.detach().double().requires_grad_() for x in leaves], topk_idx
    )
    for name, one, other in zip(NAMES, found, exact):
        assert one.shape == other.shape
        bound = 0.3 if name == "weights" else 0.12  # two sums, each with terms of both signs
        assert (one.double() - other).norm() <= bound * other.norm(), name


def test_gradients_of_weights_are_added_to_main_grad() -> None:
    leaves, topk_idx = problem(128)
    expected = with_gradients(fp8_experts, leaves, topk_idx)
    x, weights, w_in, w_out = leaves
    for weight in (w_in, w_out):
        weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    y = fp8_experts(x, weights, topk_idx, w_in, w_out)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    y.backward(grad)
    assert w_in.grad is None
    assert w_out.grad is None
    for weight, found in ((w_in, expected[3]), (w_out, expected[4])):
        torch.testing.assert_close(weight.main_grad - 1, found.float(), rtol=1e-2, atol=1e-2)


def test_weights_are_quantized_once_and_again_after_every_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(
        module, "quantize_weights", lambda w: calls.append(w) or quantize_weights(w)
    )
    weight = torch.nn.Parameter(torch.randn(2, 128, 128))
    cache = WeightCache()
    first = cache(weight)
    assert cache(weight) is first
    assert len(calls) == 1
    torch.optim.SGD([weight], lr=1.0).zero_grad()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    second = cache(weight)
    assert not torch.equal(second.forward[0].view(torch.uint8), first.forward[0].view(torch.uint8))
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(cache(weight).forward[1], 2 * second.forward[1])
    weight.data = torch.randn(2, 128, 128)
    cache(weight)
    assert len(calls) == 4
    assert copy.deepcopy(cache)._weights is None


def test_shared_experts_are_cached_and_use_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        module, "quantize_weights", lambda w: calls.append(w) or quantize_weights(w)
    )
    torch.manual_seed(0)
    layer = MoELayer(128, 128, 4, 2, num_shared_experts=2, precision="fp8", dtype=torch.bfloat16)
    x = torch.randn(32, 128).bfloat16()
    layer(x).sum().backward()
    layer(x)
    assert len(calls) == 4
    expected = {name: weight.grad for name, weight in layer.named_parameters()}
    layer.zero_grad()
    weights = {name: weight for name, weight in layer.named_parameters() if name != "router"}
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    layer(x).sum().backward()
    for name, weight in weights.items():
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad.bfloat16(), expected[name])


@pytest.mark.parametrize("device", DEVICES)
def test_layer_in_fp8_is_near_the_layer_in_bfloat16(device: str) -> None:
    torch.manual_seed(0)
    settings = {"num_experts": 4, "num_topk": 2, "num_shared_experts": 1, "dtype": torch.bfloat16}
    layer = MoELayer(256, 128, precision="fp8", device=device, **settings)
    plain = MoELayer(256, 128, device=device, **settings)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 50, 256, device=device).bfloat16()
    one, other = (x.clone().requires_grad_() for _ in range(2))
    found, expected = layer(one), plain(other)
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad)
    pairs = [(found, expected), (one.grad, other.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(layer.parameters(), plain.parameters())]
    for got, wanted in pairs:
        assert got is not None
        assert wanted is not None
        assert got.dtype == wanted.dtype
        assert (got - wanted).float().norm() / wanted.float().norm() < 0.1


def test_layer_follows_its_optimizer() -> None:
    torch.manual_seed(0)
    layer = MoELayer(128, 128, 4, 2, precision="fp8", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x, wanted = torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    losses = []
    for _ in range(8):
        loss = (layer(x) - wanted).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    fresh = copy.deepcopy(layer)
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("change", [{"hidden": 192}, {"intermediate": 96}, {"fp8": True}])
def test_what_fp8_products_cannot_do_is_refused(change: dict[str, Any]) -> None:
    settings = {"hidden": 128, "intermediate": 128, **change}
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"MoELayer: {name} must be"):
        MoELayer(**settings, num_experts=4, num_topk=2, precision="fp8")


def test_second_derivatives_are_refused() -> None:
    leaves, topk_idx = problem(16)
    x, weights, w_in, w_out = leaves
    y = fp8_experts(x, weights, topk_idx, w_in, w_out)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = MoELayer(128, 128, 4, 2, precision="fp8", dtype=torch.bfloat16)
    x = torch.randn(32, 128).bfloat16()
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    with torch.no_grad():  # the masked layout
        torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    assert layer.w_in.grad is not None


# ---- few tokens ---------------------------------------------------------------------------------


def test_masked_rows() -> None:
    rows = map_masked_rows(torch.tensor([[0, 2], [2, -1], [7, 0]]), 4)
    assert rows.num_rows_per_expert.tolist() == [2, 0, 2, 0]
    assert rows.pos_to_expert.tolist() == [0, 0, -1] + [-1] * 3 + [2, 2, -1] + [-1] * 3
    assert rows.pos_to_token_topk.tolist() == [0, 5, -1] + [-1] * 3 + [1, 2, -1] + [-1] * 3
    assert rows.token_topk_to_pos.tolist() == [[0, 6], [7, -1], [-1, 1]]
    assert {x.dtype for x in rows} == {torch.int32}


def masked_and_contiguous(num_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    (x, weights, w_in, w_out), topk_idx = problem(num_tokens, device=device)
    quantized = quantize_weights(w_in), quantize_weights(w_out)
    with torch.no_grad():
        found = fp8_experts_masked(x, weights, topk_idx, *(w.forward for w in quantized))
        return found, fp8_experts(x, weights, topk_idx, w_in, w_out, quantized)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 8, 65, 128])
def test_masked_layout_has_the_bits_of_the_contiguous_one(num_tokens: int, device: str) -> None:
    found, expected = masked_and_contiguous(num_tokens, device)
    assert torch.equal(found, expected)
    assert found.any()


@pytest.mark.emulated
def test_masked_layout_has_the_bits_of_the_contiguous_one_emulated() -> None:
    with tile_kernels.backend("emulate"):
        found, expected = masked_and_contiguous(3, "cpu")
    assert torch.equal(found, expected)


def test_layer_chooses_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of tokens, and only where no gradient is needed."""
    calls = []
    monkeypatch.setattr(
        layer_module, "fp8_experts_masked", lambda *x: calls.append(x) or fp8_experts_masked(*x)
    )
    torch.manual_seed(0)
    layer = MoELayer(128, 128, 4, 2, num_shared_experts=1, precision="fp8", dtype=torch.bfloat16)
    x = torch.randn(129, 128).bfloat16()
    expected = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        layer(x[:0])
        assert not calls
        assert torch.equal(layer(x[:128]), expected[:128])
        assert len(calls) == 2  # the experts and the shared one
        assert torch.equal(layer(x[7]), expected[7])
    calls.clear()
    layer(x[:1])
    assert not calls
    layer.requires_grad_(False)
    layer(x[:1])
    assert len(calls) == 2


def test_training_after_inference_mode() -> None:
    layer = MoELayer(128, 128, 4, 2, precision="fp8", dtype=torch.bfloat16)
    x = torch.randn(8, 128).bfloat16()
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.w_in.grad is not None


def test_main_grad_with_checkpointing() -> None:
    layer = MoELayer(128, 128, 4, 2, precision="fp8", dtype=torch.bfloat16)
    for weight in (layer.w_in, layer.w_out):
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    x = torch.randn(8, 128).bfloat16().requires_grad_()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    for weight in (layer.w_in, layer.w_out):
        assert weight.grad is None
        assert weight.main_grad.any()


def test_no_tokens_with_a_gradient_that_is_expanded() -> None:
    leaves, topk_idx = problem(0)
    x, weights, w_in, w_out = leaves
    fp8_experts(x, weights, topk_idx, w_in, w_out).sum().backward()
    assert w_in.grad is not None
    assert not w_in.grad.any()


def test_writes_past_the_version_counter_need_clear() -> None:
    weight, cache = torch.nn.Parameter(torch.randn(1, 128, 128)), WeightCache()
    first = cache(weight)
    weight.data.mul_(2)
    assert cache(weight) is first
    cache.clear()
    assert torch.equal(cache(weight).forward[1], 2 * first.forward[1])


def test_frozen_weights_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture reads the copy; a change is an error in it, and goes to the same memory outside."""
    capturing = False
    monkeypatch.setattr(module, "_is_capturing", lambda _: capturing)
    weight, cache = torch.nn.Parameter(torch.randn(2, 128, 256)), WeightCache()
    cache.freeze(weight)
    frozen = cache(weight)
    capturing = True
    assert cache(weight) is frozen
    with torch.no_grad():
        weight.mul_(-3)
    with pytest.raises(RuntimeError, match="weights have changed since they were frozen"):
        cache(weight)
    capturing = False
    cache.freeze(weight)
    capturing = True
    assert cache(weight) is frozen
    for kept, fresh in zip(frozen, quantize_weights(weight)):
        assert torch.equal(kept[0].view(torch.uint8), fresh[0].view(torch.uint8))
        assert torch.equal(kept[1], fresh[1])
    cache.unfreeze()
    assert cache(weight) is not frozen
    assert not copy.deepcopy(cache)._frozen


def test_layer_freezes_its_quantized_weights() -> None:
    layer = MoELayer(128, 128, 4, 2, precision="fp8", num_shared_experts=1)
    layer.freeze_quantized_weights()
    assert all(cache._frozen for cache in layer._quantized.values())
    layer.freeze_quantized_weights(False)
    assert not any(cache._frozen for cache in layer._quantized.values())
    with pytest.raises(ValueError, match='freeze_quantized_weights needs precision="fp8"'):
        MoELayer(128, 128, 4, 2).freeze_quantized_weights()


def test_repeated_choices_in_the_masked_layout() -> None:
    """The rows that do not fit are dropped; the other tokens keep their results."""
    x, weights, w_in, w_out = (leaf.detach() for leaf in problem(4)[0])
    quantized = quantize_weights(w_in).forward, quantize_weights(w_out).forward
    single = torch.tensor([[0, -1], [0, -1], [0, -1], [1, 2]])
    expected = fp8_experts_masked(x, weights, single, *quantized)
    topk_idx = torch.tensor([[0, 0], [0, 0], [0, 0], [1, 2]])  # six rows for four places
    found = fp8_experts_masked(x, weights, topk_idx, *quantized)
    assert found.isfinite().all()
    assert torch.equal(found[3], expected[3])
    with tile_kernels.checked(), pytest.raises(ValueError, match="different experts"):
        fp8_experts_masked(x, weights, topk_idx, *quantized)


def test_dtypes_that_casts_do_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="MoELayer: dtype must be bfloat16 or float32"):
        MoELayer(128, 128, 4, 2, precision="fp8", dtype=torch.float16)


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_forward_and_backward_in_a_cuda_graph(precision: str) -> None:
    """No host wait anywhere; a replay sees other tokens, other choices and other weights."""
    torch.manual_seed(0)
    layer = MoELayer(
        256, 128, 8, 2, precision=precision, balancing="none", device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> tuple[Tensor, ...]:
        y = layer(x)
        return (y, *torch.autograd.grad(y, (x, *layer.parameters()), grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        for weight in layer.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    graph.replay()
    for one, other in zip(captured, step()):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.gpu
def test_decoding_in_a_cuda_graph() -> None:
    """No host wait; a replay sees other tokens and other choices."""
    torch.manual_seed(0)
    layer = MoELayer(256, 128, 8, 2, precision="fp8", device="cuda", dtype=torch.bfloat16)
    layer.requires_grad_(False)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    many = torch.cat((x, torch.randn(512, 256, device="cuda").bfloat16()))
    assert torch.equal(captured, layer(x))
    assert torch.equal(captured, layer(many)[:64])  # by the contiguous layout


@pytest.mark.gpu
def test_a_graph_with_frozen_weights_follows_their_updates() -> None:
    torch.manual_seed(0)
    layer = MoELayer(256, 128, 8, 2, precision="fp8", device="cuda", dtype=torch.bfloat16)
    layer.requires_grad_(False)
    layer.freeze_quantized_weights()
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    graph.replay()
    before = captured.clone()
    assert torch.equal(before, layer(x))
    layer.w_in.mul_(0.5)
    graph.replay()
    assert torch.equal(captured, before)
    layer.freeze_quantized_weights()
    graph.replay()
    assert torch.equal(captured, layer(x))
    assert not torch.equal(captured, before)


@pytest.mark.gpu
def test_no_host_wait() -> None:
    layer = MoELayer(256, 128, 8, 2, precision="fp8", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
