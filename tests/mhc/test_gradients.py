"""The mHC operators in training: gradients through autograd, buffers, limits, invariance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mhc.helpers import each_ground, each_kernel, leaf
from tile_kernels import mhc
from tile_kernels import torch as references
from tile_kernels.mhc import shapes
from tile_kernels.runtime.cases import assert_equal_results

BF16 = torch.bfloat16


def autograd_gradients(
    function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]
) -> Any:
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    return torch.autograd.grad(results, inputs, grads)


def assert_near(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        rtol, atol = (1.6e-2, 1e-2) if one.dtype == BF16 else (1e-4, 1e-4)
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


# ---- gradients ----------------------------------------------------------------------------------


def sine_sublayer(ops: Any, hidden: Tensor, mixes: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """From the hidden state to the next residual, the sublayer being a sine."""
    m = 4
    residual = ops["expand"](hidden, m)
    pre, post, comb = ops["split"](mixes, scale, base, m, 2.0, 0.01)
    comb = ops["sinkhorn"](comb, 10, 1e-6)
    output = ops["read"](residual, pre).sin()
    result: Tensor = ops["post"](output, residual, post, comb)
    return result


OPERATORS = {
    "expand": mhc.expand_to_mhc,
    "split": mhc.mhc_pre_split_mixes,
    "sinkhorn": mhc.sinkhorn_normalize,
    "read": mhc.mhc_pre_apply_mix,
    "post": mhc.mhc_post,
}
REFERENCES = {
    "expand": references.expand_to_mhc_ref,
    "split": references.mhc_pre_split_mixes_ref,
    "sinkhorn": references.sinkhorn_normalize_ref,
    "read": references.mhc_pre_apply_mix_ref,
    "post": references.mhc_post_ref,
}


@each_ground
def test_a_sublayer_trains_as_the_references_do(device: str) -> None:
    inputs = [
        leaf(2, 3, 24, device=device, dtype=BF16),
        leaf(2, 3, 24, device=device),
        leaf(3, device=device),
        leaf(24, device=device),
    ]
    grad = torch.randn(2, 3, 4, 24, device=device).bfloat16()
    found = autograd_gradients(lambda *a: sine_sublayer(OPERATORS, *a), inputs, [grad])
    expected = autograd_gradients(lambda *a: sine_sublayer(REFERENCES, *a), inputs, [grad])
    for one, other in zip(found, expected):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 1e-2  # gradients pass through bfloat16 on the way


def test_a_sublayer_compiles_with_its_gradient() -> None:
    inputs = [leaf(2, 3, 24, device="cpu", dtype=BF16), leaf(2, 3, 24, device="cpu")]
    inputs += [leaf(3, device="cpu"), leaf(24, device="cpu")]
    grad = torch.randn(2, 3, 4, 24).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a: sine_sublayer(OPERATORS, *a), fullgraph=True, backend="aot_eager"
    )
    found = autograd_gradients(compiled, inputs, [grad])
    expected = autograd_gradients(lambda *a: sine_sublayer(OPERATORS, *a), inputs, [grad])
    assert_near(found, expected)


@each_ground
@pytest.mark.parametrize("m", [1, 3, 4, 8])
def test_each_operator_has_the_gradient_of_its_reference(device: str, m: int) -> None:
    hidden, x = (leaf(2, 3, 16, device=device, dtype=BF16) for _ in range(2))
    residual = leaf(2, 3, m, 16, device=device, dtype=BF16)
    mix, comb = leaf(2, 3, m, 1, device=device), leaf(2, 3, m, m, device=device)
    grad_x, grad = x.detach().flip(0), residual.detach().flip(0)
    pairs: list[tuple[Any, Any, list[Tensor], list[Tensor]]] = [
        (lambda h: mhc.expand_to_mhc(h, m), lambda h: references.expand_to_mhc_ref(h, m),
         [hidden], [grad]),
        (mhc.mhc_pre_apply_mix, references.mhc_pre_apply_mix_ref, [residual, mix], [grad_x]),
        (mhc.mhc_post, references.mhc_post_ref, [x, residual, mix, comb], [grad]),
        (mhc.sinkhorn_normalize, references.sinkhorn_normalize_ref, [comb],
         [comb.detach().flip(0)]),
        (lambda *a: mhc.mhc_head_compute_mix(*a, 0.1),
         lambda *a: references.mhc_head_compute_mix_ref(*a, 0.1),
         [leaf(2, 3, m, device=device), leaf(1, device=device), leaf(m, device=device)],
         [torch.randn(2, 3, m, device=device)]),
    ]  # fmt: skip
    for function, reference, inputs, grads in pairs:
        expected = autograd_gradients(reference, inputs, grads)
        assert_near(autograd_gradients(function, inputs, grads), expected)


@each_ground
def test_gradients_of_any_strides(device: str) -> None:
    """`.sum().backward()` brings one number with strides 0."""
    residual = leaf(3, 4, 16, device=device, dtype=BF16)
    mix = leaf(3, 4, 1, device=device)
    mhc.mhc_pre_apply_mix(residual, mix).sum().backward()
    assert residual.grad is not None
    assert mix.grad is not None
    assert_equal_results(residual.grad, mix.detach().expand(3, 4, 16).bfloat16())
    torch.testing.assert_close(mix.grad, residual.detach().float().sum(-1, keepdim=True))
    for function, x in (
        (lambda t: mhc.mhc_post(t[:, 0].contiguous(), t, mix, mix @ mix.mT), residual),
        (mhc.sinkhorn_normalize, leaf(3, 4, 4, device=device)),
        (lambda t: mhc.expand_to_mhc(t, 3), leaf(2, 8, device=device, dtype=BF16)),
    ):
        x.grad = None
        function(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@each_ground
def test_the_residual_gradient_can_be_accumulated(device: str) -> None:
    """What the next residual and the sublayer's input give, in one buffer, rounded per step."""
    x, residual = (leaf(*s, device=device, dtype=BF16).detach() for s in ((5, 16), (5, 4, 16)))
    post, comb = torch.rand(5, 4, 1, device=device), torch.rand(5, 4, 4, device=device)
    grad_out, grad = residual.flip(0), x.flip(0)
    _, d_residual, _, _ = mhc.mhc_post_bwd(x, residual, post, comb, grad_out)
    before = d_residual.clone()
    added, grad_mix = mhc.mhc_pre_apply_mix_bwd(grad, residual, post, d_residual)
    assert added is d_residual
    alone, same_mix = mhc.mhc_pre_apply_mix_bwd(grad, residual, post)
    assert_equal_results(grad_mix, same_mix)
    expected = before.float() + post * grad.unsqueeze(1).float()
    torch.testing.assert_close(added, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    assert_equal_results(alone, (post * grad.unsqueeze(1).float()).bfloat16())


def test_second_derivatives_are_refused_and_not_silently_cut() -> None:
    x = leaf(2, 3, 3, device="cpu")
    (grad,) = torch.autograd.grad(mhc.sinkhorn_normalize(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="sinkhorn_normalize_bwd"):
        grad.sum().backward()
    inputs = [leaf(8, device="cpu", dtype=BF16), leaf(2, 8, device="cpu", dtype=BF16)]
    inputs += [leaf(2, 1, device="cpu"), leaf(2, 2, device="cpu")]
    with pytest.raises(RuntimeError, match="mhc_post_fwd"):
        mhc.mhc_post_fwd(*inputs).sum().backward()


def test_buffers_are_refused_with_gradients() -> None:
    hidden = leaf(2, 8, device="cpu", dtype=BF16)
    out = torch.empty(2, 4, 8, dtype=BF16)
    with pytest.raises(ValueError, match="expand_to_mhc: out cannot be given with gradients"):
        mhc.expand_to_mhc(hidden, 4, out)
    with torch.no_grad():
        assert mhc.expand_to_mhc(hidden, 4, out) is out


# ---- shapes -------------------------------------------------------------------------------------


def test_limits_are_said_in_words() -> None:
    with pytest.raises(ValueError, match=r"mix must have the leading dimensions of x, \(3,\)"):
        mhc.mhc_pre_apply_mix(torch.zeros(3, 4, 8, dtype=BF16), torch.zeros(2, 4, 1))
    with pytest.raises(ValueError, match=r"x must hold square matrices of 1\.\.8 rows"):
        mhc.sinkhorn_normalize(torch.zeros(3, 9, 9))
    with pytest.raises(
        ValueError, match=r"hidden must have at least 1 dimensions \[\.\.\., hidden\]"
    ):
        mhc.expand_to_mhc(torch.zeros((), dtype=BF16), 4)
    assert mhc.expand_to_mhc(torch.zeros((1,) * 7, dtype=BF16), 4).shape == (1,) * 6 + (4, 1)
    many = torch.empty(shapes.MAX_TOKENS + 1, 1, device="meta")
    with pytest.raises(ValueError, match="input_mix must have at most 1073741824 tokens"):
        mhc.mhc_head_compute_mix(
            many, torch.zeros(1, device="meta"), torch.zeros(1, device="meta"), 0.0
        )


@each_kernel
def test_tokens_do_not_depend_on_their_batch(device: str) -> None:
    """A row is cut differently where there are few tokens; the bits are the same."""
    n, m, h = 270, 2, 520
    x, residual = torch.randn(n, h, device=device), torch.randn(n, m, h, device=device)
    x, residual = x.bfloat16(), residual.bfloat16()
    post, comb = torch.randn(n, m, 1, device=device), torch.randn(n, m, m, device=device)
    all_read, all_written = (
        mhc.mhc_pre_apply_mix(residual, post),
        mhc.mhc_post(x, residual, post, comb),
    )
    few = slice(100, 103)
    assert_equal_results(mhc.mhc_pre_apply_mix(residual[few], post[few]), all_read[few])
    written = mhc.mhc_post(x[few], residual[few], post[few], comb[few])
    assert_equal_results(written, all_written[few])
    # All in one pass, and as a sublayer that reads what another one wrote.
    again = mhc.mhc_pre_apply_mix(all_written[few], post[few])
    assert_equal_results(again, mhc.mhc_pre_apply_mix(all_written, post)[few])
