"""Hyper-connections in training, against plain autograd on the references."""

from __future__ import annotations

import copy
import gc
import pickle
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels.mhc.norm_fn.reference import tf32
from tile_kernels.modeling import mhc
from tile_kernels.modeling.mhc import (
    HyperConnection,
    HyperHead,
    RecomputedStack,
    expand_from_embedding,
    mhc_head,
    mhc_post,
    mhc_pre,
    ops,
)
from tile_kernels.runtime import emulation
from tile_kernels.testing.numeric import assert_equal, calc_diff
from tile_kernels.torch import mhc as refs

EPS = 1e-6
pytestmark = [
    pytest.mark.usefixtures("plain_matrix_products"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
]


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Copies that are trained."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def layer_inputs(*lead: int, m: int = 4, h: int = 32, device: str = "cpu") -> list[Tensor]:
    """Residual, fn, scale, base, norm weight; fn in TF32, so that references see the same."""
    torch.manual_seed(0)
    count = m * (m + 2)
    return [
        torch.randn(*lead, m, h, device=device).bfloat16(),
        tf32(torch.randn(count, m * h, device=device) * (m * h) ** -0.5),
        torch.randn(3, device=device),
        torch.randn(count, device=device),
        1 + 0.1 * torch.randn(m * h, device=device),
    ]


def reference_layer(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor | None = None
) -> Tensor:
    """A layer whose block is `tanh`, of references alone."""
    m = residual.shape[-2]
    mixes = refs.mhc_pre_norm_fn_ref(residual, fn, weight, EPS)
    pre, post, comb = refs.mhc_pre_split_mixes_ref(mixes, scale, base, m, 2.0, EPS)
    x = refs.mhc_pre_apply_mix_ref(residual, pre)
    return refs.mhc_post_ref(x.tanh(), residual, post, refs.sinkhorn_normalize_ref(comb, 10, EPS))


def ops_layer(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor | None = None
) -> Tensor:
    """The same by the functions that share a gradient through the storage."""
    mixes = ops.mhc_pre_norm_fn(residual, fn, weight, EPS)
    pre, post, comb = ops.mhc_pre_split_mixes(mixes, scale, base, residual.shape[-2], 2.0, EPS)
    comb = ops.sinkhorn_normalize(comb, 10, EPS)
    x = ops.mhc_pre_apply_mix(residual, pre)
    return ops.mhc_post(x.tanh(), residual, post, comb)


def layer(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None = None,
    fuse_grad_acc: bool = False,
) -> Tensor:
    """The same by `mhc_pre` and `mhc_post`."""
    x, mixes = mhc_pre(
        residual, fn, scale, base, norm_weight=weight, mhc_mult=residual.shape[-2],
        post_mult_value=2.0, fuse_grad_acc=fuse_grad_acc,
    )  # fmt: skip
    return mhc_post(x.tanh(), residual, *mixes)


def fused_layer(*inputs: Tensor) -> Tensor:
    return layer(*inputs, fuse_grad_acc=True)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradients of all inputs for a fixed one of the result."""
    trained = leaves(*inputs)
    out = function(*trained)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device=out.device).to(out.dtype))
    assert all(tensor.grad is not None for tensor in trained)
    return out.detach(), [tensor.grad for tensor in trained]  # type: ignore[misc]


def assert_near(found: tuple[Tensor, list[Tensor]], wanted: tuple[Tensor, list[Tensor]]) -> None:
    for result, reference in zip((found[0], *found[1]), (wanted[0], *wanted[1])):
        assert result.dtype == reference.dtype
        assert result.shape == reference.shape
        assert calc_diff(result, reference) < 5e-5


# ---- one function after the other --------------------------------------------------------------


def token_tensors(*shapes: tuple[int, ...], bf16: tuple[int, ...] = ()) -> list[Tensor]:
    torch.manual_seed(0)
    drawn = [torch.randn(shape) for shape in shapes]
    return [x.bfloat16() if place in bf16 else x for place, x in enumerate(drawn)]


def closest(found: Any, wanted: Any, rtol: float | None = None, atol: float | None = None) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def test_expand() -> None:
    (hidden,) = token_tensors((2, 3, 40), bf16=(0,))
    for m in (1, 2, 4, 8):
        found = gradients(lambda x, m=m: ops.expand_to_mhc(x, m), [hidden])
        closest(found, gradients(lambda x, m=m: refs.expand_to_mhc_ref(x, m), [hidden]))


@pytest.mark.parametrize("with_weight", [False, True])
def test_norm_fn(with_weight: bool) -> None:
    residual, fn, _, _, weight = layer_inputs(2, 50, h=64)
    fn = 1e-4 * torch.randn_like(fn)
    inputs = [residual, fn, weight] if with_weight else [residual, fn]

    def found(residual: Tensor, fn: Tensor, weight: Tensor | None = None) -> Tensor:
        return ops.mhc_pre_norm_fn(residual, fn, weight, EPS)

    def wanted(residual: Tensor, fn: Tensor, weight: Tensor | None = None) -> Tensor:
        return refs.mhc_pre_norm_fn_ref(residual, fn, weight, EPS)

    out, grads = gradients(found, inputs)
    reference, plain = gradients(wanted, inputs)
    closest(out, reference, 1e-3, 1e-3)
    closest(grads[0], plain[0])
    closest(grads[1], plain[1], 1e-3, 3e-2)
    if with_weight:
        assert calc_diff(grads[2], plain[2]) < 1e-6


def test_split_mixes() -> None:
    inputs = token_tensors((2, 70, 24), (3,), (24,))

    def joined(split: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *x: torch.cat([part.flatten(2) for part in split(*x, 4, 2.0, 1e-2)], -1)

    found = gradients(joined(ops.mhc_pre_split_mixes), inputs)
    closest(found, gradients(joined(refs.mhc_pre_split_mixes_ref), inputs), 1e-5, 2e-5)


@pytest.mark.parametrize("n", [1, 70])
def test_sinkhorn(n: int) -> None:
    inputs = token_tensors((2, n, 4, 4))
    found = gradients(lambda x: ops.sinkhorn_normalize(x, 10, EPS), inputs)
    closest(found, gradients(lambda x: refs.sinkhorn_normalize_ref(x, 10, EPS), inputs))


def test_head_mix() -> None:
    inputs = token_tensors((2, 70, 4), (1,), (4,))
    found = gradients(lambda *x: ops.mhc_head_compute_mix(*x, 1e-2), inputs)
    wanted = gradients(lambda *x: refs.mhc_head_compute_mix_ref(*x, 1e-2), inputs)
    closest(found, wanted, 1e-4, 1e-5)


def test_apply_mix() -> None:
    x, mix = token_tensors((2, 9, 4, 40), (2, 9, 4, 1))
    inputs = [x.sigmoid().bfloat16(), mix.softmax(-2)]
    found, wanted = (
        gradients(f, inputs) for f in (ops.mhc_pre_apply_mix, refs.mhc_pre_apply_mix_ref)
    )
    closest(found, wanted, 1e-3, 1e-2)


def test_post() -> None:
    inputs = token_tensors((2, 9, 40), (2, 9, 4, 40), (2, 9, 4, 1), (2, 9, 4, 4), bf16=(0, 1))
    out, grads = gradients(ops.mhc_post, inputs)
    reference, plain = gradients(refs.mhc_post_ref, inputs)
    closest(out, reference)
    closest(grads[:2], plain[:2])
    closest(grads[2:], plain[2:], 1e-4, 1e-4)


def test_gradients_without_strides() -> None:
    """`sum().backward()` gives gradients with strides of 0."""
    inputs = layer_inputs(3)
    ones, zeros = leaves(*inputs), leaves(*inputs)
    ops_layer(*ones).backward(torch.ones_like(inputs[0]))
    ops_layer(*zeros).sum().backward()
    for a, b in zip(ones, zeros):
        assert_equal(a.grad, b.grad)


# ---- the gradient on the storage ---------------------------------------------------------------

ATTRIBUTE = "grad_from_mhc_post"


def left_on(tensor: Tensor) -> Tensor | None:
    return getattr(tensor.untyped_storage(), ATTRIBUTE, None)


@pytest.mark.parametrize("flat", [False, True])
def test_norm_fn_adds_to_what_was_left(flat: bool) -> None:
    inputs = layer_inputs(1, 13)[:2]
    out, plain = gradients(lambda *x: ops.mhc_pre_norm_fn(*x, None, EPS), inputs)
    residual, fn = leaves(*inputs)
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, EPS)
    shape = (13, *residual.shape[-2:]) if flat else residual.shape
    buffer = torch.zeros(shape, dtype=torch.bfloat16)
    residual.untyped_storage().grad_from_mhc_post = buffer
    torch.manual_seed(1)
    mixes.backward(torch.randn(out.shape))
    assert residual.grad is None
    assert left_on(residual) is None
    assert_equal(buffer.view(residual.shape), plain[0])
    assert_equal(fn.grad, plain[1])


def test_norm_fn_leaves_what_it_does_not_fuse() -> None:
    residual, fn = leaves(*layer_inputs(1, 13)[:2])
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, EPS, fuse_grad_acc=False, n_splits=2)
    buffer = torch.zeros_like(residual)
    residual.untyped_storage().grad_from_mhc_post = buffer
    mixes.sum().backward()
    assert residual.grad is not None
    assert residual.grad.any()
    assert left_on(residual) is buffer
    assert not buffer.any()


def test_apply_mix_adds_to_what_was_left() -> None:
    x, mix = token_tensors((1, 9, 4, 40), (1, 9, 4, 1), bf16=(0,))
    _, plain = gradients(ops.mhc_pre_apply_mix, [x, mix])
    x, mix = leaves(x, mix)
    out = ops.mhc_pre_apply_mix(x, mix)
    buffer = torch.zeros(9, 4, 40, dtype=torch.bfloat16)
    x.untyped_storage().grad_from_mhc_post = buffer
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).bfloat16())
    assert x.grad is None
    assert left_on(x) is buffer
    assert_equal(buffer[None], plain[0])
    assert_equal(mix.grad, plain[1])


def test_post_leaves_its_gradient() -> None:
    inputs = token_tensors((2, 9, 40), (2, 9, 4, 40), (2, 9, 4, 1), (2, 9, 4, 4), bf16=(0, 1))
    x, residual, post, comb = leaves(*inputs)
    seen = []
    residual.register_hook(lambda grad: seen.append(grad.data_ptr()))
    ops.mhc_post(x, residual, post, comb).float().square().sum().backward()
    left = left_on(residual)
    assert left is not None
    assert left.shape == (18, 4, 40)
    assert left.data_ptr() == seen[0]
    assert_equal(left.view(residual.shape), residual.grad)
    frozen = inputs[1].clone()
    ops.mhc_post(x, frozen, post, comb).sum().backward()
    assert left_on(frozen) is None  # no one asked for it


def test_post_by_hand() -> None:
    inputs = token_tensors((2, 9, 40), (2, 9, 4, 40), (2, 9, 4, 1), (2, 9, 4, 4), bf16=(0, 1))
    out, plain = gradients(ops.mhc_post, inputs)
    assert_equal(ops.mhc_post_fwd(*inputs), out)
    torch.manual_seed(1)
    d_o = torch.randn(out.shape).bfloat16()
    grads = ops.mhc_post_bwd(*inputs, d_o, fuse_grad_acc=False)
    assert left_on(inputs[1]) is None
    for found, wanted in zip(grads, plain):
        assert_equal(found, wanted)
    again = ops.mhc_post_bwd(*inputs, d_o)
    left = left_on(inputs[1])
    assert left is not None
    assert left.data_ptr() == again[1].data_ptr()


@pytest.mark.parametrize("with_weight", [False, True])
def test_layer_of_functions_shares_one_gradient(with_weight: bool) -> None:
    inputs = layer_inputs(2, 5)[: 5 if with_weight else 4]
    assert_near(gradients(ops_layer, inputs), gradients(reference_layer, inputs))
    residual, *others = leaves(*inputs)
    out = ops_layer(residual, *others)
    out.retain_grad()
    out.sum().backward()
    assert left_on(residual) is None
    assert left_on(out) is None
    assert residual.grad is not None


def test_words_of_what_was_left() -> None:
    x, mix = leaves(*token_tensors((9, 4, 40), (9, 4, 1), bf16=(0,)))
    out = ops.mhc_pre_apply_mix(x, mix)
    x.untyped_storage().grad_from_mhc_post = torch.zeros(8, 4, 40).bfloat16()
    with pytest.raises(
        ValueError, match=r"grad_from_mhc_post, .* 1440 elements on cpu, got .*8, 4"
    ):
        out.sum().backward()


def test_functions_compile() -> None:
    inputs = layer_inputs(2, 5)
    torch._dynamo.reset()
    compiled = torch.compile(ops_layer, fullgraph=True, backend="aot_eager")
    assert_near(gradients(compiled, inputs), gradients(ops_layer, inputs))


@pytest.mark.parametrize("function", ["ops_layer", "fused_layer"])
def test_no_second_derivative(function: str) -> None:
    """Not even through what was saved, which PyTorch's own way would not notice."""
    x, mix = leaves(*token_tensors((9, 4, 40), (9, 4, 1), bf16=(0,)))
    (grad,) = torch.autograd.grad(ops.mhc_pre_apply_mix(x, mix).sum(), mix, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()
    inputs = leaves(*layer_inputs(5))
    out = globals()[function](*inputs)
    grads = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
    for found, wanted in zip(grads, torch.autograd.grad(out.float().square().sum(), inputs)):
        assert calc_diff(found, wanted) < 1e-5
        with pytest.raises(RuntimeError, match=r"no second derivatives|modified inplace"):
            torch.autograd.grad(found.sum(), inputs[0], retain_graph=True)


# ---- buffers of the caller ---------------------------------------------------------------------


@pytest.mark.parametrize("which", ["expand", "apply", "post"])
def test_out_is_filled_in_training(which: str) -> None:
    x, residual, post, comb = token_tensors(
        (2, 9, 40), (2, 9, 4, 40), (2, 9, 4, 1), (2, 9, 4, 4), bf16=(0, 1)
    )
    function, inputs = {
        "expand": (lambda hidden, **out: ops.expand_to_mhc(hidden, 4, **out), [x]),
        "apply": (ops.mhc_pre_apply_mix, [residual, post]),
        "post": (ops.mhc_post, [x, residual, post, comb]),
    }[which]
    wanted, plain = gradients(function, inputs)
    out = torch.full_like(wanted, 7)
    for _ in range(2):  # a buffer may be used again
        result, grads = gradients(lambda *given: function(*given, out=out), inputs)
        assert result.data_ptr() == out.data_ptr()
        assert_equal(out, wanted)
        for found, expected in zip(grads, plain):
            assert_equal(found, expected)
        out.fill_(7)
    with torch.no_grad():
        assert function(*inputs, out=out).data_ptr() == out.data_ptr()
    assert_equal(out, wanted)


# ---- main_grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ops_layer, layer, fused_layer])
@pytest.mark.parametrize("with_weight", [False, True])
def test_main_grad_takes_gradients(function: Callable[..., Tensor], with_weight: bool) -> None:
    inputs = layer_inputs(2, 5)[: 5 if with_weight else 4]
    _, plain = gradients(function, inputs)
    torch.manual_seed(1)
    grad = torch.randn_like(inputs[0])
    for place in range(1, len(inputs)):
        trained = leaves(*inputs)
        trained[place].main_grad = torch.ones(inputs[place].shape)  # type: ignore[attr-defined]
        buffer = trained[place].main_grad  # type: ignore[attr-defined]
        out = function(*trained)
        trained[place].main_grad = None  # type: ignore[attr-defined]
        out.backward(grad)  # the one of the forward pass counts
        for index, (tensor, wanted) in enumerate(zip(trained, plain)):
            if index == place:
                assert tensor.grad is None
                assert_equal(buffer, wanted + 1)
            else:
                assert_equal(tensor.grad, wanted)


def test_main_grad_of_the_head() -> None:
    residual, fn, scale, base, _ = layer_inputs(5)
    inputs = [residual, fn, scale[:1], base[:4]]
    _, plain = gradients(mhc_head, inputs)
    trained = leaves(*inputs)
    for tensor in trained[1:]:
        tensor.main_grad = torch.zeros_like(tensor)  # type: ignore[attr-defined]
    torch.manual_seed(1)
    mhc_head(*trained).backward(torch.randn(5, 32).bfloat16())
    assert_equal(trained[0].grad, plain[0])
    for tensor, wanted in zip(trained[1:], plain[1:]):
        assert tensor.grad is None
        assert_equal(tensor.main_grad, wanted)  # type: ignore[attr-defined]


def test_frozen_parameters_leave_main_grad_alone() -> None:
    residual, fn, scale, base, _ = layer_inputs(5)
    fn.main_grad = torch.zeros_like(fn)  # type: ignore[attr-defined]
    layer(residual.requires_grad_(), fn, scale, base).sum().backward()
    assert not fn.main_grad.any()  # type: ignore[attr-defined]


def test_parameters_in_bfloat16_have_float32_main_grad() -> None:
    residual, fn, *others = layer_inputs(5)
    rounded = fn.bfloat16()
    _, plain = gradients(layer, [residual, rounded.float(), *others])
    trained = leaves(residual, rounded, *others)
    trained[1].main_grad = torch.zeros(fn.shape)  # type: ignore[attr-defined]
    torch.manual_seed(1)
    layer(*trained).backward(torch.randn(residual.shape).bfloat16())
    assert_equal(trained[1].main_grad, plain[1])  # type: ignore[attr-defined]
    _, grads = gradients(layer, [residual, rounded, *others])
    assert_equal(grads[1], plain[1].bfloat16())


def test_words_of_main_grad() -> None:
    residual, fn, scale, base, _ = leaves(*layer_inputs(5))
    fn.main_grad = torch.zeros(3)  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"main_grad of fn must be float32 \[24, 128\], got .*\[3\]"
    ):
        layer(residual, fn, scale, base)
    fn.main_grad = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="main_grad of mhc_fn must be a tensor, got int"):
        ops.mhc_pre_norm_fn(residual, fn, None, EPS)
    fn.main_grad = torch.zeros_like(fn)  # type: ignore[attr-defined]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="main_grad"):
        compiled(residual, fn, scale, base)


# ---- around a sublayer -------------------------------------------------------------------------


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("function", [layer, fused_layer])
def test_layer_is_close_to_plain_autograd(
    ground: tuple[str, str], function: Callable[..., Tensor]
) -> None:
    backend, device = ground
    inputs = layer_inputs(7, h=64, device=device)
    with tile_kernels.backend(backend):
        found = gradients(function, inputs)
    assert_near(found, gradients(reference_layer, inputs))


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("with_weight", [False, True])
def test_any_number_of_streams(m: int, with_weight: bool) -> None:
    inputs = layer_inputs(6, m=m, h=16)[: 5 if with_weight else 4]
    wanted = gradients(reference_layer, inputs)
    if m == 1:  # there is one matrix, and nothing to learn for it
        wanted[1][1][2:] = wanted[1][3][2:] = wanted[1][2][2:] = 0
    for function in (layer, fused_layer, ops_layer):
        out, grads = gradients(function, inputs)
        if m == 1:
            grads[1][2:] = grads[3][2:] = grads[2][2:] = 0
        assert_near((out, grads), wanted)


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (1, 2, 3)])
def test_any_leading_dimensions(lead: tuple[int, ...]) -> None:
    inputs = layer_inputs(*lead)
    flat = [inputs[0].reshape(-1, 4, 32), *inputs[1:]]
    for function in (layer, fused_layer):
        out, grads = gradients(function, inputs)
        same, wanted = gradients(function, flat)
        assert_equal(out, same.view(out.shape))
        for a, b in zip(grads, wanted):
            assert_equal(a, b.view(a.shape))


@pytest.mark.parametrize("function", [layer, fused_layer, ops_layer])
def test_no_tokens(function: Callable[..., Tensor]) -> None:
    out, grads = gradients(function, layer_inputs(2, 0))
    assert out.shape == (2, 0, 4, 32)
    assert grads[0].shape == out.shape
    assert not any(grad.any() for grad in grads[1:])
    with torch.no_grad():
        assert function(*layer_inputs(2, 0)).shape == out.shape


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("with_weight", [False, True])
def test_same_bits_without_gradients(ground: tuple[str, str], with_weight: bool) -> None:
    backend, device = ground
    residual, fn, scale, base, weight = layer_inputs(7, h=64, device=device)
    given: dict[str, Any] = {"norm_weight": weight} if with_weight else {}
    with tile_kernels.backend(backend):
        trained = mhc_pre(*leaves(residual, fn, scale, base), **given)
        frozen = mhc_pre(residual, fn, scale, base, **given)
        with torch.no_grad():
            inference = mhc_pre(*leaves(residual, fn, scale, base), **given, fuse_grad_acc=True)
    assert trained[0].grad_fn is not None
    assert inference[1][2:] == (None,)
    for other in (frozen, inference):
        assert_equal(other[0], trained[0].detach())
        for a, b in zip(other[1][:2], trained[1][:2]):
            assert isinstance(a, Tensor)
            assert_equal(a, b.detach())


def test_inference_is_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = tile_kernels.mhc.mhc_pre_big_fuse
    monkeypatch.setattr(
        tile_kernels.mhc, "mhc_pre_big_fuse", lambda *given: calls.append(given) or fused(*given)
    )
    inputs = layer_inputs(5)[:4]
    mhc_pre(*inputs)
    with torch.no_grad():
        mhc_pre(*leaves(*inputs))
    assert len(calls) == 2
    for place in range(4):
        mhc_pre(*inputs[:place], *leaves(inputs[place]), *inputs[place + 1 :])
    mhc_pre(*inputs, norm_weight=torch.ones(128, requires_grad=True))
    assert len(calls) == 2


@pytest.mark.parametrize("trained", [False, True])
def test_launches_before_and_after_a_sublayer(trained: bool) -> None:
    inputs = layer_inputs(5)[:4]
    with tile_kernels.backend("emulate"), emulation.reports() as launches:
        layer_input, mixes = mhc_pre(*(leaves(*inputs) if trained else inputs))
        assert len(launches) == 2
        mhc_post(layer_input, inputs[0], *mixes)
        assert len(launches) == 3


def test_only_what_needs_a_gradient_gets_one() -> None:
    inputs = layer_inputs(5)
    _, wanted = gradients(fused_layer, inputs)
    torch.manual_seed(1)
    grad = torch.randn_like(inputs[0])
    for place in range(5):
        some = [tensor.clone() for tensor in inputs]
        some[place].requires_grad_()
        fused_layer(*some).backward(grad)
        assert [tensor.grad is None for tensor in some] == [index != place for index in range(5)]
        assert_equal(some[place].grad, wanted[place])


# ---- who else reads the residual ---------------------------------------------------------------


def with_another_reader(when: str) -> Callable[..., Callable[..., Tensor]]:
    """A layer whose residual is also read elsewhere, before, within or after it."""

    def around(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def whole(residual: Tensor, *others: Tensor) -> Tensor:
            residual = residual * 1  # not a leaf
            early = residual.float().sin() if when == "before" else 0
            out = function(residual, *others, block_reads=residual if when == "within" else None)
            late = residual.float().cos() if when == "after" else 0
            if when == "twice":
                return function(residual, *others) + out
            return (out.float() + early + late).bfloat16()

        return whole

    return around


def reading_layer(fuse_grad_acc: bool | None) -> Callable[..., Tensor]:
    """A layer whose block may read the residual too; None: of references."""

    def run(*inputs: Tensor, block_reads: Tensor | None = None) -> Tensor:
        residual, fn, scale, base = inputs
        if fuse_grad_acc is None:
            mixes = refs.mhc_pre_norm_fn_ref(residual, fn, None, EPS)
            pre, post, comb = refs.mhc_pre_split_mixes_ref(mixes, scale, base, 4, 1.0, EPS)
            x = refs.mhc_pre_apply_mix_ref(residual, pre)
            mixes = (post, refs.sinkhorn_normalize_ref(comb, 10, EPS))
        else:
            x, mixes = mhc_pre(*inputs, fuse_grad_acc=fuse_grad_acc)
        y = x.tanh() if block_reads is None else x.tanh() * block_reads.mean(-2)
        write = refs.mhc_post_ref if fuse_grad_acc is None else mhc_post
        return write(y.contiguous(), residual, *mixes)

    return run


@pytest.mark.parametrize("when", ["never", "before", "within", "after", "twice"])
def test_other_readers_of_the_residual(when: str) -> None:
    inputs = layer_inputs(6)[:4]
    around = with_another_reader(when)
    wanted = gradients(around(reading_layer(None)), inputs)
    for fuse_grad_acc in (False, True):
        assert_near(gradients(around(reading_layer(fuse_grad_acc)), inputs), wanted)


def test_layers_in_a_row() -> None:
    inputs = layer_inputs(6)

    def three(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda residual, *others: function(
            function(function(residual, *others), *others), *others
        )

    found, unfused, wanted = (
        gradients(three(f), inputs) for f in (fused_layer, layer, reference_layer)
    )
    for a, b, c in zip((found[0], *found[1]), (unfused[0], *unfused[1]), (wanted[0], *wanted[1])):
        assert calc_diff(a, b) < 1e-4
        assert calc_diff(a, c) < 1e-4


@pytest.mark.parametrize("ground", GROUNDS)
def test_fused_layer_makes_one_gradient(
    ground: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor that `mhc_post` makes is the one that the residual gets."""
    backend, device = ground
    made = []
    backward = tile_kernels.mhc.mhc_post_bwd

    def noted(*given: Any) -> Any:
        grads = backward(*given)
        made.append(grads[1].data_ptr())
        return grads

    monkeypatch.setattr(tile_kernels.mhc, "mhc_post_bwd", noted)
    residual, *others = leaves(*layer_inputs(7, h=64, device=device))
    with tile_kernels.backend(backend):
        fused_layer(residual, *others).sum().backward()
    assert residual.grad is not None
    assert made == [residual.grad.data_ptr()]


def test_what_others_hold_is_not_written() -> None:
    """The carried residual read by another: autograd's sum is new, and is copied."""
    inputs = layer_inputs(6)[:4]

    def run(residual: Tensor, *others: Tensor) -> Tensor:
        x, (post, comb, carried) = mhc_pre(residual, *others, fuse_grad_acc=True)
        out = mhc_post(x.tanh(), residual, post, comb, carried)
        return out + carried.residual

    def wanted(residual: Tensor, *others: Tensor) -> Tensor:
        return reading_layer(None)(residual, *others) + residual

    assert_near(gradients(run, inputs), gradients(wanted, inputs))
    residual, *others = leaves(*inputs)
    x, (_, _, carried) = mhc_pre(residual, *others, fuse_grad_acc=True)
    grad = torch.ones_like(residual)
    torch.autograd.backward((x, carried.residual), (torch.ones_like(x), grad))  # no mhc_post
    assert_equal(grad, torch.ones_like(grad))
    assert calc_diff(residual.grad, grad) > 0.01


def test_backward_twice() -> None:
    once, twice = leaves(*layer_inputs(6)), leaves(*layer_inputs(6))
    (2 * fused_layer(*once)).sum().backward()
    out = fused_layer(*twice).sum()
    out.backward(retain_graph=True)
    out.backward()
    for a, b in zip(once, twice):
        assert calc_diff(a.grad, b.grad) < 1e-5


def test_part_of_the_graph() -> None:
    """What `mhc_post` made and no one added to is not taken for another gradient."""
    inputs = leaves(*layer_inputs(6)[:4])
    x, mixes = mhc_pre(*inputs, fuse_grad_acc=True)
    y = x.detach().tanh().requires_grad_()
    out = mhc_post(y, inputs[0], *mixes)
    torch.autograd.grad(out.sum(), y, retain_graph=True)
    found = torch.autograd.grad(x.sum(), inputs)
    wanted = torch.autograd.grad(mhc_pre(*inputs)[0].sum(), inputs)
    for a, b in zip(found, wanted):
        assert_equal(a, b)
    with pytest.raises(
        ValueError, match="carried must come from the mhc_pre call of the same residual"
    ):
        mhc_post(y, inputs[0].clone(), *mixes)


class Token:
    """Lives as long as the memory of a tensor."""


def memory_of(tensor: Tensor) -> weakref.ref[Token]:
    """Dead when the last holder of a tensor's memory has let it go."""
    token = Token()
    tensor.untyped_storage().token = token
    return weakref.ref(token)


@pytest.mark.parametrize("run", [fused_layer, layer, ops_layer, "stack"])
@pytest.mark.parametrize("with_backward", [False, True])
def test_nothing_keeps_the_graph(run: Any, with_backward: bool) -> None:
    """No cycle of references: what the graph holds goes with its end."""
    residual, *others = leaves(*layer_inputs(6))
    stack = stack_of(2)
    gc.freeze()  # so that a collection looks at new objects alone
    for _ in range(2):  # the first call of an operator makes more garbage
        read = residual * 1
        held = memory_of(read)
        gc.collect()
        gc.disable()
        out = stack(read) if run == "stack" else run(read, *others)
        del read
        kept = held() is not None
        if with_backward:
            out.sum().backward(retain_graph=True)
        del out
        gone = held() is None
        gc.enable()
    gc.unfreeze()
    assert kept
    assert gone


def test_checkpoint_of_a_layer() -> None:
    inputs = layer_inputs(6)
    out, grads = gradients(
        lambda *given: checkpoint(fused_layer, *given, use_reentrant=False), inputs
    )
    same, wanted = gradients(fused_layer, inputs)
    assert_equal(out, same)
    for a, b in zip(grads, wanted):
        assert_equal(a, b)


def test_words_of_the_functions() -> None:
    inputs = layer_inputs(6, m=2)[:4]
    with pytest.raises(
        ValueError, match=r"mhc_pre: residual must be \[..., 4, h\] .* \[6, 2, 32\]"
    ):
        mhc_pre(*inputs)
    with pytest.raises(ValueError, match=r"mhc_head: residual must be \[..., 4, h\] for mhc_mult"):
        mhc_head(*inputs)
    with pytest.raises(ValueError, match="fn must"):
        mhc_pre(inputs[0], inputs[1][:, :-8].contiguous(), *inputs[2:], mhc_mult=2)


# ---- enter and leave ---------------------------------------------------------------------------


def reference_head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    mixes = refs.mhc_pre_norm_fn_ref(residual, fn, None, EPS)
    mix = refs.mhc_head_compute_mix_ref(mixes, scale, base, EPS)
    return refs.mhc_pre_apply_mix_ref(residual, mix.unsqueeze(-1))


@pytest.mark.parametrize("lead", [(), (1,), (2,), (13,), (3, 4), (2, 1, 3)])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_head(lead: tuple[int, ...], m: int) -> None:
    residual, fn, scale, base, weight = layer_inputs(*lead, m=m)
    inputs = [residual, fn[:m], scale[:1], base[:m]]
    wanted = gradients(reference_head, inputs)
    assert_near(gradients(lambda *x: mhc_head(*x, mhc_mult=m), inputs), wanted)
    # A scale without dimensions, more rows than are used.
    trained = leaves(residual, fn, scale[0], base[:m])
    torch.manual_seed(1)
    out = mhc_head(*trained, mhc_mult=m)
    out.backward(torch.randn(out.shape).bfloat16())
    assert_equal(out.detach(), mhc_head(*inputs, mhc_mult=m))
    assert calc_diff(trained[1].grad[:m], wanted[1][1]) < 2e-5  # type: ignore[index]
    assert not trained[1].grad[m:].any()  # type: ignore[index]
    assert trained[2].grad.shape == ()  # type: ignore[union-attr]
    folded = mhc_head(residual, fn[:m] * weight, *inputs[2:], mhc_mult=m)
    assert_equal(mhc_head(*inputs, norm_weight=weight, mhc_mult=m), folded)


def test_head_without_tokens() -> None:
    residual, fn, scale, base, _ = layer_inputs(2, 0)
    out, grads = gradients(mhc_head, [residual, fn[:4], scale[:1], base[:4]])
    assert out.shape == (2, 0, 32)
    assert not any(grad.any() for grad in grads[1:])


def test_head_example() -> None:
    """One token, projections 0 and 1 by construction: both weights are 0.51."""
    residual = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat_interleave(4, 1).bfloat16()
    rows = torch.zeros(2, 16)
    rows[1, 0] = (residual.float().square().mean()).sqrt()
    out = mhc_head(
        residual, rows, torch.tensor(2.0), torch.tensor([0.0, -2.0]), mhc_mult=2, pre_eps=0.01,
        norm_eps=0.0,
    )  # fmt: skip
    assert out[[0, 4]].tolist() == [2.046875, 3.0625]


def test_enter() -> None:
    (x,) = token_tensors((2, 3, 40), bf16=(0,))
    closest(
        gradients(expand_from_embedding, [x]), gradients(lambda x: ops.expand_to_mhc(x, 4), [x])
    )
    assert expand_from_embedding(x, 2).shape == (2, 3, 2, 40)


# ---- HyperConnection ---------------------------------------------------------------------------


class Block(nn.Module):
    """Something to learn, in float32."""

    def __init__(self, h: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(h, h)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * self.linear(x).tanh()


def connection(m: int = 4, **given: Any) -> HyperConnection:
    torch.manual_seed(3)
    return HyperConnection(Block(), 32, m, block_dtype=torch.float32, **given)


def parameter_gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in found.values())
    module.zero_grad(set_to_none=True)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("given", [{}, {"norm_weight": True}, {"post_mult_value": 1.0}])
def test_a_new_layer_is_a_residual(m: int, given: dict[str, Any]) -> None:
    module, head = connection(m, **given), HyperHead(32, m)
    x = torch.randn(50, 32).bfloat16()
    out = module(expand_from_embedding(x, m))
    wanted = x.float() + module.block(x.float())
    for stream in (*out.unbind(-2), head(out)):
        assert (stream - wanted).abs().max() < 0.03 * wanted.abs().max()
    got = module.read(torch.randn(50, m, 32).bfloat16())  # streams that differ
    closest(got.comb, (0.99 * torch.eye(m) + 0.01).expand_as(got.comb), 0, 0.02)
    closest(got.post, torch.ones_like(got.post), 0, 0.03)
    if m > 1:
        assert got.comb[0].diagonal().max() < 1


def test_module_is_its_functions() -> None:
    module = connection(norm_weight=True)
    residual = layer_inputs(2, 5)[0]
    x, mixes = mhc_pre(
        residual, module.fn, module.scale, module.base, norm_weight=module.norm_weight,
        post_mult_value=2.0, sinkhorn_repeat=20,
    )  # fmt: skip
    y = module.block(x.float(), 0.5).bfloat16()
    assert_equal(module(residual, 0.5), mhc_post(y, residual, *mixes))
    assert_equal(module(residual, factor=0.5), module(residual, 0.5))


def test_module_compiles() -> None:
    module = nn.Sequential(connection(norm_weight=True), connection(), HyperHead(32))
    residual = layer_inputs(2, 5)[0].requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outs, grads = [], []
    for run in (module, compiled):
        outs.append(run(residual))
        outs[-1].float().square().sum().backward()
        grads.append({**parameter_gradients(module), "residual": residual.grad})
        residual.grad = None
    assert_equal(*outs)
    for name, grad in grads[0].items():
        assert calc_diff(grads[1][name], grad) < 1e-4, name
    with torch.no_grad():
        assert_equal(compiled(residual), outs[0].detach())


def test_state_goes_round() -> None:
    module, other = connection(norm_weight=True), connection(norm_weight=True)
    nn.init.normal_(module.base)
    names = {"fn", "scale", "base", "norm_weight", "block.linear.weight", "block.linear.bias"}
    assert set(module.state_dict()) == names
    residual = layer_inputs(5)[0]
    wanted = module(residual)
    assert not torch.equal(other(residual), wanted)
    other.load_state_dict(module.state_dict())
    for clone in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_equal(clone(residual), wanted)
    with torch.device("meta"):
        empty = HyperConnection(Block(), 32, norm_weight=True, block_dtype=torch.float32)
    empty.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert_equal(empty(residual), wanted)


def test_parameters_of_another_dtype() -> None:
    module = connection(norm_weight=True)
    residual = layer_inputs(5)[0]
    wanted = module(residual)
    module.to(torch.bfloat16).block.float()
    out = module(residual)
    assert calc_diff(out, wanted) < 1e-4
    out.sum().backward()
    assert module.fn.grad is not None
    assert module.fn.grad.dtype == torch.bfloat16
    assert HyperHead(32, dtype=torch.bfloat16)(residual).dtype == torch.bfloat16


def test_words_of_the_modules() -> None:
    module = connection(norm_weight=True)
    with pytest.raises(ValueError, match=r"HyperConnection: residual must be \[..., 4, 32\], got"):
        module(torch.zeros(3, 2, 32).bfloat16())
    with pytest.raises(ValueError, match=r"HyperHead: mhc_mult must be in 1\.\.8, got 9"):
        HyperHead(32, 9)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 8, got 20"):
        HyperConnection(Block(), 20)
    pair = HyperConnection(lambda x: (x, x), 32)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"the block must return a tensor like .*, got tuple"):
        pair(torch.zeros(3, 4, 32).bfloat16())
    with pytest.raises(TypeError, match="layers must be HyperConnections, got Linear"):
        RecomputedStack([nn.Linear(2, 2)])  # type: ignore[list-item]
    text = repr(nn.Sequential(module, HyperHead(32, 2)))
    assert "hidden=32, streams=4, norm_weight=True, post_mult_value=2.0, sinkhorn_repeat=20" in text
    assert "HyperHead(hidden=32, streams=2, norm_weight=False)" in text


def test_module_without_tokens() -> None:
    module = nn.Sequential(connection(), HyperHead(32))
    assert module(torch.zeros(2, 0, 4, 32).bfloat16()).shape == (2, 0, 32)


@pytest.mark.slow
def test_module_learns() -> None:
    torch.manual_seed(4)
    module = nn.Sequential(connection(), connection(), HyperHead(32))
    x = torch.randn(64, 32).bfloat16()
    wanted = x.float().roll(1, -1).sin()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    losses = []
    for _ in range(40):
        loss = (module(expand_from_embedding(x)).float() - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    for name, parameter in module.named_parameters():
        assert not torch.equal(parameter, before[name]), name


# ---- RecomputedStack ---------------------------------------------------------------------------


class BfloatBlock(nn.Module):
    """Keeps its own input, a view of it, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32).bfloat16())

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        turned = (x.view(-1, 32).t() * self.weight[:, None]).t().view(x.shape)
        return factor * x.sin() * turned


def stack_of(number: int, **given: Any) -> RecomputedStack:
    torch.manual_seed(5)
    layers = [HyperConnection(BfloatBlock(), 32, 4, **given) for _ in range(number)]
    for module in layers:
        nn.init.constant_(module.scale, 1.0)
    return RecomputedStack(layers)


def plain_run(stack: RecomputedStack, residual: Tensor, *args: Any) -> Tensor:
    for module in stack.layers:
        residual = module(residual, *args)
    return residual


@pytest.mark.parametrize("ground", GROUNDS)
def test_stack_is_its_layers(ground: tuple[str, str]) -> None:
    backend, device = ground
    stack = stack_of(3).to(device)
    residual = layer_inputs(5, device=device)[0].requires_grad_()
    outs, grads = [], []
    with tile_kernels.backend(backend):
        for run in (plain_run, RecomputedStack.__call__):
            outs.append(run(stack, residual, 0.5))
            outs[-1].float().square().sum().backward()
            grads.append([residual.grad, *parameter_gradients(stack).values()])
            residual.grad = None
    assert_equal(*(out.detach() for out in outs))
    for a, b in zip(*grads):
        assert_equal(a, b)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_short_stacks(number: int) -> None:
    stack = stack_of(number)
    x = layer_inputs(5)[0]
    _, wanted = gradients(lambda residual: plain_run(stack, residual), [x])
    _, found = gradients(stack, [x])
    assert_equal(found[0], wanted[0])


def test_stack_keeps_no_residuals() -> None:
    """But for the first, no residual and no layer input."""
    stack = stack_of(4)
    alive: list[weakref.ref[Token]] = []
    for module in stack.layers:
        read = module.read

        def noted(residual: Tensor, with_pre: bool = False, read: Any = read) -> Any:
            assert sum(memory() is not None for memory in alive) == (len(alive) > 0)
            got = read(residual, with_pre)
            alive.extend((memory_of(residual), memory_of(got.layer_input)))
            return got

        module.read = noted  # type: ignore[method-assign]
    residual = layer_inputs(5)[0].requires_grad_()
    out = stack(residual)
    assert [memory() is not None for memory in alive] == [True] + [False] * 7
    out.sum().backward()
    assert residual.grad is not None


def test_stack_lets_go_what_it_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers, rebuilds = [], []
    ledger = mhc.recompute._Ledger
    rebuild = ledger.rebuild

    def noted(self: Any) -> None:
        rebuilds.append(self)
        rebuild(self)

    monkeypatch.setattr(ledger, "rebuild", noted)
    monkeypatch.setattr(
        mhc.recompute, "_Ledger", lambda x: ledgers.append(ledger(x)) or ledgers[-1]
    )
    stack, residual = stack_of(3), layer_inputs(5)[0].requires_grad_()
    out = stack(residual).float().sum()
    (first,) = torch.autograd.grad(out, residual, retain_graph=True)
    assert len(rebuilds) == 1
    assert not any(name.is_residual for name in ledgers[0].rebuilt)
    (again,) = torch.autograd.grad(out, residual)
    assert_equal(first, again)
    gone = weakref.ref(ledgers.pop())
    rebuilds.clear()
    del out
    assert gone() is None


def test_stack_with_frozen_parts() -> None:
    stack, residual = stack_of(3), layer_inputs(5)[0]
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_("layers.1.block" in name or "layers.2" in name)
    grads = []
    for run in (plain_run, RecomputedStack.__call__):
        run(stack, residual).float().sum().backward()
        found = [parameter.grad for parameter in stack.parameters()]
        grads.append([grad for grad in found if grad is not None])
        stack.zero_grad(set_to_none=True)
    assert len(grads[0]) == len(grads[1]) == 1 + 4
    for a, b in zip(*grads):
        assert_equal(a, b)
    with torch.no_grad():
        assert_equal(stack(residual), plain_run(stack, residual))


def test_stack_sees_what_was_written() -> None:
    stack, residual = stack_of(2), (layer_inputs(5)[0].requires_grad_() * 1)
    out = stack(residual)
    with torch.no_grad():
        residual.add_(1)
    with pytest.raises(
        RuntimeError, match=r"RecomputedStack: .* \[5, 4, 32\], was written in place"
    ):
        out.sum().backward()


def test_stack_with_a_block_that_writes_its_input() -> None:
    def block(x: Tensor) -> Tensor:
        squared = x * x  # keeps the input
        return squared * x.mul_(2)  # keeps the input as it is now: no longer the layer's

    torch.manual_seed(5)
    written = RecomputedStack([HyperConnection(block, 32) for _ in range(2)])
    plain = copy.deepcopy(written)
    for module in plain.layers:
        module.block = lambda x: (x * x) * (2 * x)
    x = layer_inputs(5)[0]
    _, wanted = gradients(lambda residual: plain_run(plain, residual), [x])
    _, found = gradients(written, [x])
    assert calc_diff(found[0], wanted[0]) < 1e-5


def test_stack_compiles_and_takes_no_tokens() -> None:
    stack, residual = stack_of(2), layer_inputs(5)[0].requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(residual).detach(), stack(residual).detach())
    empty = layer_inputs(2, 0)[0].requires_grad_()
    stack(empty).sum().backward()
    assert empty.grad.shape == (2, 0, 4, 32)  # type: ignore[union-attr]


# ---- the example -------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_the_example_learns() -> None:
    path = Path(__file__).parents[2] / "examples" / "mhc_transformer.py"
    losses = runpy.run_path(str(path))["train"](steps=30)
    assert losses[-1] < 0.4 * losses[0]
