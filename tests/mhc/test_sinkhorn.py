"""Sinkhorn normalisation: worked examples, numerical derivatives, properties, extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tile_kernels
from tests.mhc.helpers import F64, assert_gradients, close, each_kernel, gradients, random, sizes
from tile_kernels import mhc
from tile_kernels import torch as references
from tile_kernels.runtime.cases import assert_equal_results
from tile_kernels.torch import mhc as mhc_reference

LOGITS = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])


@pytest.mark.parametrize(
    "normalize", [references.sinkhorn_normalize_ref, mhc_reference.sinkhorn_normalize]
)
def test_sinkhorn_example(normalize: Callable[..., Tensor]) -> None:
    close(normalize(LOGITS, 1), 0.3333333, 0.5999994, 0.6666653, 0.3999998)
    close(normalize(LOGITS, 2), 0.3636363, 0.6315780, 0.6363627, 0.3684211)
    close(normalize(LOGITS), 0.3660253, 0.6339737, 0.6339737, 0.3660254)


def test_sinkhorn_gradient_example() -> None:
    grad = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = mhc_reference.sinkhorn_normalize_bwd(grad, LOGITS, 2)
    close(found, 0.1239665, -0.1239665, -0.1198343, 0.1198343)


@sizes
@pytest.mark.parametrize("repeat", [1, 2, 10])
def test_gradient_of_sinkhorn(m: int, repeat: int) -> None:
    torch.manual_seed(m)
    x, grad = random(3, m, m), random(3, m, m)

    def normalize(x: Tensor) -> Tensor:
        return references.sinkhorn_normalize_ref(x, repeat, 1e-6)

    torch.testing.assert_close(mhc_reference.sinkhorn_normalize(x, repeat), normalize(x))
    assert_gradients(
        [mhc_reference.sinkhorn_normalize_bwd(grad, x, repeat)], gradients(normalize, [x], grad)
    )
    if repeat < 10 and m <= 4:  # seconds for larger matrices
        assert torch.autograd.gradcheck(normalize, x.requires_grad_())


def test_float32_gradients_are_near_those_in_float64() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(200, 4, 4), torch.randn(200, 4, 4)
    found = mhc_reference.sinkhorn_normalize_bwd(grad, x)
    expected = mhc_reference.sinkhorn_normalize_bwd(grad.double(), x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-6)


def test_no_tokens() -> None:
    assert mhc_reference.sinkhorn_normalize(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    assert (
        mhc_reference.sinkhorn_normalize_bwd(torch.zeros(0, 3, 3), torch.zeros(0, 3, 3)).numel()
        == 0
    )
    grads = torch.zeros(0, 2, 1), torch.zeros(0, 2, 1), torch.zeros(0, 2, 2)
    found = mhc_reference.mhc_pre_split_mixes_bwd(
        *grads, torch.zeros(0, 8), torch.ones(3), torch.ones(8), 1.0
    )
    assert [t.tolist() for t in found] == [[], [0.0] * 3, [0.0] * 8]


# ---- properties of Sinkhorn ---------------------------------------------------------------------


@st.composite
def matrices(draw: st.DrawFn, bound: float = 3.0) -> Tensor:
    size = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(4, size, size, generator=generator, dtype=F64) * 2 - 1) * bound


properties = settings(deadline=None, max_examples=20)


@properties
@given(matrices())
def test_columns_sum_to_one_and_rows_nearly(x: Tensor) -> None:
    y = mhc_reference.sinkhorn_normalize(x.float())
    assert (y > 0).all()
    torch.testing.assert_close(y.sum(-2), torch.ones(y.shape[:-1]), rtol=0, atol=1e-5)
    enough = mhc_reference.sinkhorn_normalize(x, 400, 1e-12)
    for dim in (-1, -2):
        torch.testing.assert_close(
            enough.sum(dim), torch.ones(x.shape[:-1], dtype=F64), rtol=0, atol=1e-6
        )


@properties
@given(matrices(), st.integers(0, 2**31))
def test_permutations_go_through(x: Tensor, seed: int) -> None:
    size = x.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(size, generator=generator) for _ in range(2)]
    moved = x[:, order[0]][..., order[1]]
    for repeat in (1, 5):
        expected = mhc_reference.sinkhorn_normalize(x, repeat)[:, order[0]][..., order[1]]
        torch.testing.assert_close(mhc_reference.sinkhorn_normalize(moved, repeat), expected)
    # A number on top of a row changes nothing.
    shifted = x + torch.randn(size, 1, dtype=F64, generator=generator)
    torch.testing.assert_close(
        mhc_reference.sinkhorn_normalize(shifted), mhc_reference.sinkhorn_normalize(x)
    )


@properties
@given(matrices())
def test_gradients_are_orthogonal_to_what_changes_nothing(x: Tensor) -> None:
    """A number on top of a row of logits changes nothing; with `eps` 0 and many steps, nor does
    one on top of a column. So the gradient sums to zero along both."""
    grad = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = mhc_reference.sinkhorn_normalize_bwd(grad, x)
    zeros = torch.zeros(x.shape[:-1], dtype=F64)
    torch.testing.assert_close(found.sum(-1), zeros, rtol=0, atol=1e-10)
    found = mhc_reference.sinkhorn_normalize_bwd(grad, x, 400, 0.0)
    torch.testing.assert_close(found.sum(-2), zeros, rtol=0, atol=1e-6)
    # A multiple of the last divisors has no effect on columns that are divided by them.
    y = mhc_reference.sinkhorn_normalize(x, 1, 0.0)
    through = mhc_reference.sinkhorn_normalize_bwd(torch.ones_like(y), x, 1, 0.0)
    torch.testing.assert_close(through, torch.zeros_like(x), rtol=0, atol=1e-10)


@properties
@given(matrices(80.0))
def test_far_logits_stay_finite(x: Tensor) -> None:
    x = x.float()
    y = mhc_reference.sinkhorn_normalize(x)
    assert y.isfinite().all()
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(-2), torch.ones(y.shape[:-1]), rtol=0, atol=0.5)
    assert mhc_reference.sinkhorn_normalize_bwd(torch.ones_like(x), x).isfinite().all()


def test_rows_converge_as_documented() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, 4, 4)
    errors = [
        (mhc_reference.sinkhorn_normalize(x, repeat).sum(-1) - 1).abs().max().item()
        for repeat in (1, 2, 5, 10, 20)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 2e-2
    assert errors[4] < 1e-3


def test_doubly_stochastic() -> None:
    """The kernel's own matrices: columns to the last bits, rows with enough steps."""
    logits = torch.empty(40, 4, 4).uniform_(-3, 3)
    with tile_kernels.backend("emulate"):
        found = mhc.sinkhorn_normalize(logits, 200, 1e-8)
        extreme = mhc.sinkhorn_normalize(80 * logits.sign(), 20, 1e-6)
    for dim in (-1, -2):
        torch.testing.assert_close(found.sum(dim), torch.ones(40, 4), rtol=0, atol=1e-6)
    assert extreme.isfinite().all()
    torch.testing.assert_close(extreme.sum(-2), torch.ones(40, 4), rtol=0, atol=3e-6)


@each_kernel
@pytest.mark.parametrize("size", [2, 4, 7])
def test_far_logits_are_as_exact_as_near_ones(device: str, size: int) -> None:
    x = (torch.rand(40, size, size) * 160 - 80).to(device)
    x[3, 0, 1] = float("nan")
    found = mhc.sinkhorn_normalize(x)
    expected = mhc_reference.sinkhorn_normalize(x.double())
    finite = expected.isfinite()
    assert_equal_results(found.isfinite(), finite)
    assert finite.flatten(1).all(1).sum() == 39  # NaN stays in its matrix
    torch.testing.assert_close(found[finite].double(), expected[finite], rtol=1e-4, atol=1e-9)


@each_kernel
@pytest.mark.parametrize("repeat", [21, 22, 60])
def test_gradient_of_many_steps(device: str, repeat: int) -> None:
    """More than are kept at a time."""
    x, grad = torch.randn(2, 9, 4, 4, device=device)
    found = mhc.sinkhorn_normalize_bwd(grad, x, repeat)
    expected = mhc_reference.sinkhorn_normalize_bwd(grad.double(), x.double(), repeat)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-6)


def test_kernels_as_nemo_calls_them() -> None:
    """The three names that it imports, and its calling sequence: an autograd function."""
    from tile_kernels.mhc.sinkhorn_kernel import (  # type: ignore[import-not-found]
        _mhc_sinkhorn_bwd,
        _mhc_sinkhorn_fwd,
    )
    from tile_kernels.modeling.mhc.ops import sinkhorn_normalize

    torch.manual_seed(0)
    x = torch.randn(7, 4, 4, requires_grad=True)
    forward, backward = (make(4, 32, 20, 1e-6) for make in (_mhc_sinkhorn_fwd, _mhc_sinkhorn_bwd))

    class Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            out = torch.empty_like(x)
            forward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad_out: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            grad_x = torch.empty_like(x)
            backward(grad_out.contiguous(), x, grad_x)
            return grad_x

    weights = torch.randn(7, 4, 4)
    (Sinkhorn.apply(x) * weights).sum().backward()
    found, x.grad = x.grad, None
    expected = sinkhorn_normalize(x, repeat=20, eps=1e-6)
    assert torch.equal(Sinkhorn.apply(x), expected)
    (expected * weights).sum().backward()
    assert torch.equal(found, x.grad)
    with pytest.raises(ValueError, match=r"mhc_sinkhorn: x must hold matrices of 4 rows"):
        forward(torch.zeros(1, 3, 3), torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match="mhc_sinkhorn: token_block must be"):
        _mhc_sinkhorn_fwd(4, 0, 20, 1e-6)
