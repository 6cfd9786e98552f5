"""The gate to the precision that training relies on, and its exact promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import engram
from tile_kernels.engram.gate.plan import count_parts
from tile_kernels.testing.numeric import calc_diff
from tile_kernels.torch.engram import engram_gate_ref

EPS, CLAMP = 1e-20, 1e-6
GRID = [
    pytest.param("emulate", "cpu", (23, 4, 2048), id="emulate"),
    *(
        pytest.param("tilelang", "cuda", (t, 4, h), id=f"cuda-{t}-{h}", marks=pytest.mark.gpu)
        for t in (0, 4001, 8001)
        for h in (2048, 2560, 3072, 4096, 6144, 7168)
    ),
]
on_grid = pytest.mark.parametrize(("backend", "device", "shape"), GRID)


def inputs(shape: tuple[int, int, int], device: str) -> tuple[Tensor, ...]:
    num_tokens, streams, hidden = shape
    made = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=made, device=device).bfloat16()

    return (
        normal(*shape),
        normal(*shape),
        normal(num_tokens, hidden),
        *(normal(streams, hidden) for _ in range(2)),
    )


@on_grid
def test_forward(backend: str, device: str, shape: tuple[int, int, int]) -> None:
    x, k, v, *weights = inputs(shape, device)
    expected = engram_gate_ref(x, k, v, *weights, CLAMP, EPS, save_for_backward=True)  # type: ignore[misc]
    with tile_kernels.backend(backend):
        weight = engram.fused_weight(*weights)
        saved = engram.engram_gate_fwd(x, k, v, weight, EPS, CLAMP)
        plain = engram.engram_gate_fwd(x, k, v, weight, EPS, CLAMP, save_for_backward=False)
    assert torch.equal(saved[0], plain[0])
    assert plain[1:] == (None,) * 4
    for one, other in zip(saved, expected):
        assert calc_diff(one, other) < 2e-10


@on_grid
def test_backward(backend: str, device: str, shape: tuple[int, int, int]) -> None:
    x, k, v, *weights = inputs(shape, device)
    leaves = [x.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    leaves += [w.float().requires_grad_() for w in weights]
    outputs = engram_gate_ref(*leaves, CLAMP, EPS, save_for_backward=True)  # type: ignore[misc]
    grad_out = torch.randn_like(outputs[0])
    expected = torch.autograd.grad(outputs[0], leaves, grad_out, retain_graph=True)
    with tile_kernels.backend(backend):
        weight = engram.fused_weight(*weights)
        saved: list[Any] = [*outputs[1:], CLAMP]  # still attached to the graph
        *grads, partial = engram.engram_gate_bwd(grad_out, x, k, v, weight, *saved)
        buffers = [torch.ones_like(w, dtype=torch.float32) for w in weights]
        engram.grad_w_reduce(partial, *weights, *buffers)
    for one, other in zip((*grads, *(buffer - 1 for buffer in buffers)), expected):
        assert not one.requires_grad
        assert calc_diff(one, other) < 1e-8


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_a_dot_product_of_zero_has_no_slope_without_a_clamp(backend: str) -> None:
    """The slope of the square root is infinite there; with a clamp it does not matter."""
    x, k, v, *weights = inputs((3, 2, 64), "cpu")
    k[0] = 0
    with tile_kernels.backend(backend):
        weight = engram.fused_weight(*weights)
        _, *saved = engram.engram_gate_fwd(x, k, v, weight, 1e-6, 0.0)
        grads = engram.engram_gate_bwd(torch.ones_like(x), x, k, v, weight, *saved, 0.0)
    assert torch.equal(saved[1][0], torch.full((2,), 0.5))  # the gate
    assert torch.equal(grads[0][0], torch.ones_like(x[0]))  # the residual's alone
    assert all(grad.isfinite().all() for grad in grads)


def test_parts_do_not_depend_on_the_budget() -> None:
    device = torch.device("cpu")
    before = count_parts(4096, 4, 7168, device)
    num_sms = tile_kernels.get_num_sms()
    tile_kernels.set_num_sms(num_sms // 2)
    try:
        assert count_parts(4096, 4, 7168, device) == before
    finally:
        tile_kernels.set_num_sms(num_sms)
    assert count_parts(0, 4, 7168, device) == 1
    assert count_parts(5, 4, 7168, device) == 5


@pytest.mark.parametrize("shape", [(37, 2, 512), (9, 6, 8448)], ids=["whole", "groups"])
def test_few_blocks_give_the_same_bits(shape: tuple[int, int, int]) -> None:
    """Blocks that take several parts, of an odd number of tokens too, and blocks that take one."""
    x, k, v, *weights = inputs(shape, "cpu")
    grad_out = torch.randn_like(x)
    num_sms = tile_kernels.get_num_sms()
    results = []
    with tile_kernels.backend("emulate"):
        weight = engram.fused_weight(*weights)
        saved: list[Any] = [*engram.engram_gate_fwd(x, k, v, weight, EPS, CLAMP)[1:], CLAMP]
        for budget in (num_sms, 3, 1):
            tile_kernels.set_num_sms(budget)
            try:
                grads = engram.engram_gate_bwd(grad_out, x, k, v, weight, *saved)
                buffers = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
                engram.grad_w_reduce(grads[3], *weights, *buffers)
                results.append((*grads, *buffers))
            finally:
                tile_kernels.set_num_sms(num_sms)
    for other in results[1:]:
        for one, same in zip(results[0], other):
            assert torch.equal(one, same)


def test_parts_of_three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of several warps that takes parts with an odd number of tokens each."""
    monkeypatch.setattr("tile_kernels.engram.gate.op.count_parts", lambda *_: 4)
    x, k, v, *weights = inputs((12, 1, 1024), "cpu")
    num_sms = tile_kernels.get_num_sms()
    tile_kernels.set_num_sms(1)
    try:
        with tile_kernels.backend("emulate"):
            weight = engram.fused_weight(*weights)
            saved: list[Any] = [*engram.engram_gate_fwd(x, k, v, weight, EPS, CLAMP)[1:], CLAMP]
            engram.engram_gate_bwd(x, x, k, v, weight, *saved)  # races would be reported
    finally:
        tile_kernels.set_num_sms(num_sms)


def test_second_derivatives_are_refused() -> None:
    x, k, v, *weights = inputs((3, 1, 64), "cpu")
    leaf = x.requires_grad_()
    out = engram.engram_gate(leaf, k, v, *weights, CLAMP, EPS)
    (grad,) = torch.autograd.grad(out.float().square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="engram_gate_fwd: there is no second derivative"):
        grad.float().sum().backward()


def test_one_buffer_for_both_gradients_is_refused() -> None:
    weights = torch.ones(2, 2, 64).bfloat16()
    buffer = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="embed must not share memory with grad_weight_hidden"):
        engram.grad_w_reduce(torch.ones(1, 2, 64), *weights, buffer[:2], buffer[1:])


def test_token_counts_that_are_known_at_run_time() -> None:
    """Compiled once for any number of tokens, one that depends on data included."""

    def step(x: Tensor, keep: Tensor, weight: Tensor) -> Tensor:
        chosen = x[keep.nonzero()[:, 0]]
        out = engram.engram_gate_fwd(chosen, chosen, chosen[:, 0], weight, EPS, CLAMP)[0]
        return out.float().sum()

    x = torch.randn(9, 2, 64).bfloat16().requires_grad_()
    keep = torch.arange(9) % 2
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(x, keep, torch.ones(2, 64)), x)
    (expected,) = torch.autograd.grad(step(x, keep, torch.ones(2, 64)), x)
    assert torch.equal(grad, expected)


def test_gradients_of_the_composed_gate() -> None:
    """`engram_gate` differentiates as its definition does, without the residual too."""
    x, k, v, *weights = inputs((9, 3, 64), "cpu")
    leaves = [tensor.requires_grad_() for tensor in (x, k, v, *weights)]
    grad_out = torch.randn_like(x)
    for add_residual in (True, False):
        with tile_kernels.backend("emulate"):
            out = engram.engram_gate(*leaves, CLAMP, EPS, add_residual)  # type: ignore[misc]
            grads = torch.autograd.grad(out, leaves, grad_out)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = engram_gate_ref(*wide, CLAMP, EPS)  # type: ignore[misc]
        expected = expected if add_residual else expected - wide[0]
        for one, other in zip(grads, torch.autograd.grad(expected, wide, grad_out.double())):
            assert calc_diff(one, other) < 1e-5


def test_second_import_paths() -> None:
    from tile_kernels.engram import (
        engram_fused_weight_kernel,
        engram_gate_kernel,
        engram_grad_w_reduce_kernel,
        engram_hash_kernel,
    )

    assert engram_hash_kernel.engram_hash is engram.engram_hash
    assert engram_fused_weight_kernel.fused_weight is engram.fused_weight
    assert engram_gate_kernel.engram_gate_fwd is engram.engram_gate_fwd
    assert engram_gate_kernel.engram_gate_bwd is engram.engram_gate_bwd
    assert engram_grad_w_reduce_kernel.grad_w_reduce is engram.grad_w_reduce


# ---- image tokens, packed keys and values -------------------------------------------------------


def _packed(device: str) -> dict[str, Any]:
    torch.manual_seed(8)
    x = torch.randn(5, 2, 64).bfloat16()
    x[1, 0, :3] = torch.tensor([-0.0, float("nan"), float("inf")]).bfloat16()
    kv = torch.randn(5, 3, 64).bfloat16()
    kv[1] = float("nan")  # of an image token: not used
    mask = torch.tensor([False, True, False, True, False])
    given = {"hidden_states": x, "kv": kv, "image_token_mask": mask}
    weight = torch.randn(2, 64)
    return {k: v.to(device) for k, v in {**given, "weight_fused": weight}.items()}


@pytest.mark.parametrize("ground", GROUNDS)
def test_three_modes_have_the_same_bits(ground: tuple[str, str]) -> None:
    """With saving, without, in place; image tokens keep theirs."""
    backend, device = ground
    given = _packed(device)
    with tile_kernels.backend(backend):
        saved = engram.engram_gate_packed_fwd(**given, eps=1e-6, clamp_value=1e-6)
        plain = engram.engram_gate_packed_fwd(
            **given, eps=1e-6, clamp_value=1e-6, save_for_backward=False
        )[0]
        x = given["hidden_states"].clone()
        written = engram.engram_gate_packed_fwd(
            **{**given, "hidden_states": x}, eps=1e-6, clamp_value=1e-6, save_for_backward=False,
            inplace=True,
        )[0]  # fmt: skip
    assert written is x
    mask = given["image_token_mask"]
    for other in (plain, x):
        assert torch.equal(other.view(torch.int16), saved[0].view(torch.int16))
    image = given["hidden_states"][mask].view(torch.int16)
    assert torch.equal(saved[0][mask].view(torch.int16), image)
    assert not any(each[mask].any() for each in saved[1:] if each is not None)


@pytest.mark.parametrize("ground", GROUNDS)
def test_packed_gradients_are_those_of_the_parts(ground: tuple[str, str]) -> None:
    backend, device = ground
    given = _packed(device)
    x, kv, mask = (given[name] for name in ("hidden_states", "kv", "image_token_mask"))
    x[1, 0, :3] = 0
    grad = torch.randn(5, 2, 64).bfloat16().to(device)
    grad[1, 0, 0] = -0.0
    leaves = [t.clone().requires_grad_() for t in (x, kv, given["weight_fused"])]
    with tile_kernels.backend(backend):
        out = engram.engram_gate_packed_fwd(*leaves, 1e-6, 1e-6, False, mask)[0]
        out.backward(grad)
        apart = [t.clone().requires_grad_() for t in (x, kv[:, :2], kv[:, 2])]
        weight = given["weight_fused"].clone().requires_grad_()
        engram.engram_gate_fwd(*apart, weight, 1e-6, 1e-6, image_token_mask=mask)[0].backward(grad)
    found = [leaf.grad for leaf in leaves]
    assert torch.equal(found[0].view(torch.int16), apart[0].grad.view(torch.int16))
    assert torch.equal(found[1], torch.cat((apart[1].grad, apart[2].grad[:, None]), 1))
    torch.testing.assert_close(found[2], weight.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0][mask].view(torch.int16), grad[mask].view(torch.int16))
    assert not found[1][mask].any()


def test_in_place_needs_no_gradient() -> None:
    given = _packed("cpu")
    given["kv"].requires_grad_()
    with pytest.raises(ValueError, match="inplace must be False with gradients"):
        engram.engram_gate_packed_fwd(
            **given, eps=1e-6, clamp_value=1e-6, save_for_backward=False, inplace=True
        )


def test_the_buffer_may_be_the_input() -> None:
    """`out=hidden_states` is `inplace`; both together are no other request."""
    given: dict[str, Any] = {**_packed("cpu"), "eps": 1e-6, "clamp_value": 1e-6}
    expected = engram.engram_gate_packed_fwd(**given)[0]
    for inplace in (False, True):
        x = given["hidden_states"].clone()
        out, *saved = engram.engram_gate_packed_fwd(
            **{**given, "hidden_states": x}, save_for_backward=False, inplace=inplace, out=x
        )
        assert out is x
        assert saved == [None] * 4
        assert torch.equal(x.view(torch.int16), expected.view(torch.int16))
    with pytest.raises(ValueError, match="out must be None with inplace"):
        engram.engram_gate_packed_fwd(
            **given, save_for_backward=False, inplace=True, out=torch.empty_like(x)
        )
    given["kv"].requires_grad_()
    with pytest.raises(ValueError, match="out cannot be given with gradients"):
        engram.engram_gate_packed_fwd(**given, save_for_backward=False, out=x)
