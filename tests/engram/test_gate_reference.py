"""The references of the gate: worked vectors, autograd, numerical derivatives, extremes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engram.helpers import CLAMP, EPS, INT32, inputs, int32
from tile_kernels.testing.numeric import assert_equal, calc_diff
from tile_kernels.torch import engram

NAN, INF = float("nan"), float("inf")
# ---- the gate ----------------------------------------------------------------------------------


X = [[1, 2, -1, 0.5], [0.5, -0.5, 1, 1]]
K = [[1, 0, 1, 2], [-1, 1, 0.5, 0]]
V = [1, -2, 0.5, 4]
WEIGHT_HIDDEN = [[1, 0.5, 2, 1], [1, 1, 1, 1]]
WEIGHT_EMBED = [[1, 1, 0.5, 2], [2, 1, 1, 1]]


def worked() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, k, v = (torch.tensor([values]).bfloat16() for values in (X, K, V))
    return x, k, v, torch.tensor(WEIGHT_HIDDEN).bfloat16(), torch.tensor(WEIGHT_EMBED).bfloat16()


def close_to(found: Tensor, expected: list) -> None:
    """To the seven digits that the vectors give."""
    torch.testing.assert_close(found, torch.tensor(expected).to(found), rtol=3e-7, atol=5e-8)


def test_forward_vector() -> None:
    x, k, v, weight_hidden, weight_embed = worked()
    fused = engram.fused_weight(weight_hidden, weight_embed)
    from_fused = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    reference = engram.engram_gate_ref(x, k, v, weight_hidden, weight_embed, CLAMP, EPS, True)
    for output, dot, gate_score, rstd_x, rstd_k in (from_fused, reference):
        assert all(part is not None for part in (dot, gate_score, rstd_x, rstd_k))
        assert_equal(dot, torch.tensor([[2.0, -1.0]]))
        close_to(rstd_x, [[0.8, 1.2649111]])
        close_to(rstd_k, [[0.8164966, 1.3333334]])
        close_to(gate_score, [[0.6917271, 0.2853045]])
        assert output.dtype == torch.bfloat16
        assert output.tolist() == [
            [[1.6953125, 0.6171875, -0.65234375, 3.265625],
             [0.78515625, -1.0703125, 1.140625, 2.140625]]
        ]  # fmt: skip


def test_backward_vector() -> None:
    x, k, v, weight_hidden, weight_embed = worked()
    fused = engram.fused_weight(weight_hidden, weight_embed)
    saved = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)[1:]
    grad_x, grad_k, grad_v, partial = engram.engram_gate_bwd(
        torch.ones_like(x), x, k, v, fused, *saved, CLAMP, num_parts=3
    )
    assert grad_x.tolist() == [
        [[1.1015625, 0.90234375, 1.1953125, 1.578125],
         [0.41015625, 1.265625, 1.296875, 1.1328125]]
    ]  # fmt: skip
    expected_k = [
        [[0.1005859, 0.1503906, -0.2011719, 0.0502930],
         [0.1816406, -0.0181885, 0.4003906, 0.3281250]]
    ]  # fmt: skip
    assert_equal(grad_k, torch.tensor(expected_k).bfloat16())
    assert grad_v.tolist() == [[0.9765625] * 4]
    assert partial.dtype == torch.float32
    close_to(
        partial[2],
        [[0.1507997, 0, -0.1507997, 0.1507997], [-0.1638408, -0.1638408, 0.1638408, 0]],
    )
    assert not partial[:2].any()


@pytest.mark.parametrize("add_residual", [True, False])
def test_residual(add_residual: bool) -> None:
    """The output is the residual plus the gated value, or that value alone."""
    x, k, v, weight_hidden, weight_embed = inputs(33, 2, 32, torch.float64)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    output, _, gate, _, _ = engram.engram_gate_fwd(
        x, k, v, fused, EPS, CLAMP, add_residual=add_residual
    )
    expected = gate[..., None] * v[:, None]
    torch.testing.assert_close(output, x + expected if add_residual else expected)


@pytest.mark.parametrize("add_residual", [True, False])
@pytest.mark.parametrize("clamp", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("num_parts", [1, 3, 8, 40])
def test_backward_is_autograd(add_residual: bool, clamp: float, num_parts: int) -> None:
    x, k, v, weight_hidden, weight_embed = inputs(33, 3, 16, torch.float64)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    leaves = [tensor.requires_grad_() for tensor in (x, k, v, fused)]
    output, *saved = engram.engram_gate_fwd(*leaves, 1e-6, clamp, add_residual=add_residual)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    *found, partial = engram.engram_gate_bwd(grad, *leaves, *saved, clamp, num_parts, add_residual)
    assert partial.shape == (num_parts, *fused.shape)
    assert not any(part.requires_grad for part in (*found, partial))
    for part, wanted in zip((*found, partial.sum(0)), expected):
        torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-11)


class _Gate(torch.autograd.Function):
    """The two references as one differentiable function."""

    @staticmethod
    def forward(ctx, add_residual: bool, x: Tensor, k: Tensor, v: Tensor, fused: Tensor) -> Tensor:
        output, *saved = engram.engram_gate_fwd(
            x, k, v, fused, 1e-6, 0.01, add_residual=add_residual
        )
        ctx.save_for_backward(x, k, v, fused, *saved)
        ctx.add_residual = add_residual
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        *grads, partial = engram.engram_gate_bwd(
            grad, *ctx.saved_tensors, 0.01, 2, ctx.add_residual
        )
        return None, *grads, partial.sum(0)


@pytest.mark.parametrize("add_residual", [True, False])
def test_gradients_are_numerical_derivatives(add_residual: bool) -> None:
    x, k, v, weight_hidden, weight_embed = inputs(3, 2, 4, torch.float64, seed=3)
    leaves = [part.requires_grad_() for part in (x, k, v, weight_hidden * weight_embed)]
    assert torch.autograd.gradcheck(lambda *args: _Gate.apply(add_residual, *args), leaves)


def test_backward_in_bf16_is_close_to_autograd() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(129, 4, 256, torch.bfloat16)
    weights = [weight.float().requires_grad_() for weight in (weight_hidden, weight_embed)]
    leaves = [tensor.requires_grad_() for tensor in (x, k, v)]
    reference = engram.engram_gate_ref(*leaves, *weights, CLAMP, EPS, True)
    output, *saved = reference
    grad = torch.randn_like(output)
    output.backward(grad)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    *found, partial = engram.engram_gate_bwd(grad, *leaves, fused, *saved, CLAMP, 12)
    for part, leaf in zip(found, leaves):
        assert part.dtype == torch.bfloat16
        assert calc_diff(part, leaf.grad) < 1e-8
    of_weights = torch.zeros(2, 4, 256)
    engram.grad_w_reduce(partial, weight_hidden, weight_embed, *of_weights)
    for part, weight in zip(of_weights, weights):
        assert calc_diff(part, weight.grad) < 1e-8


def test_zero_dot_has_half_a_gate_and_no_slope() -> None:
    x = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])
    k = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]])
    v, fused = torch.ones(2, 2), torch.tensor([[1.0, -1.0]])
    for clamp in (0.0, 1e-6):
        output, *saved = engram.engram_gate_fwd(x, k, v, fused, EPS, clamp)
        assert saved[0].tolist() == [[0.0], [0.0]]
        assert saved[1].tolist() == [[0.5], [0.5]]
        assert_equal(output, x + 0.5)
        grads = engram.engram_gate_bwd(torch.ones_like(x), x, k, v, fused, *saved, clamp, 1)
        assert_equal(grads[0], torch.ones_like(x))
        assert not grads[1].any()
        assert not grads[3].any()


def test_clamp_is_strict() -> None:
    """At `|s|` equal to the clamp value the gradient passes, below it does not."""
    x = torch.ones(1, 1, 1)
    v, fused = torch.ones(1, 1), torch.full((1, 1), 0.25)
    for clamp, passes in ((0.25, True), (0.2500001, False)):
        saved = engram.engram_gate_fwd(x, x, v, fused, 0.0, clamp)[1:]
        partial = engram.engram_gate_bwd(x, x, x, v, fused, *saved, clamp, 1)[3]
        assert bool(partial.any()) == passes


def test_nan_and_infinity_stay_in_their_stream() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(4, 2, 8, torch.bfloat16)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    clean = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)[0]
    x[0, 1, 3], k[1, 0, 2], x[2, 0, 0] = NAN, NAN, INF
    output, *saved = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    gate = saved[1]
    spoilt = torch.zeros(4, 2, dtype=torch.bool)
    spoilt[0, 1] = spoilt[1, 0] = spoilt[2, 0] = True
    assert torch.equal(gate.isnan(), spoilt)
    assert torch.equal(output.isnan().all(-1), spoilt)
    assert_equal(output[~spoilt], clean[~spoilt])
    grad_x = engram.engram_gate_bwd(torch.ones_like(x), x, k, v, fused, *saved, CLAMP, 1)[0]
    assert torch.equal(grad_x.isnan().any(-1), spoilt)


def test_zero_rows_need_eps() -> None:
    x, v, fused = torch.zeros(1, 1, 4), torch.ones(1, 4), torch.ones(1, 4)
    assert engram.engram_gate_fwd(x, x, v, fused, 0.0, CLAMP)[0].isnan().all()
    assert engram.engram_gate_fwd(x, x, v, fused, EPS, CLAMP)[0].tolist() == [[[0.5] * 4]]


def test_reference_takes_any_leading_dimensions() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(6, 2, 8, torch.bfloat16)
    flat = engram.engram_gate_ref(x, k, v, weight_hidden, weight_embed, CLAMP, EPS)
    found = engram.engram_gate_ref(
        x.view(2, 3, 2, 8), k.view(2, 3, 2, 8), v.view(2, 3, 8), weight_hidden, weight_embed,
        CLAMP, EPS,
    )  # fmt: skip
    assert_equal(found.view(6, 2, 8), flat)


def test_no_tokens() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(0, 4, 8, torch.bfloat16)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    output, *saved = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    assert output.shape == (0, 4, 8)
    assert all(part.shape == (0, 4) for part in saved)
    grad_x, grad_k, grad_v, partial = engram.engram_gate_bwd(
        output, x, k, v, fused, *saved, CLAMP, 5
    )
    assert grad_x.shape == grad_k.shape == (0, 4, 8)
    assert grad_v.shape == (0, 8)
    assert_equal(partial, torch.zeros(5, 4, 8))
    sizes = int32([[[3, 4], [5, 6]]])
    found = engram.engram_hash(
        torch.empty(0, 3, dtype=INT32), torch.tensor([[1, 2, 3]]), sizes, engram.make_offsets(sizes)
    )
    assert_equal(found, torch.empty(1, 0, 4, dtype=INT32))
