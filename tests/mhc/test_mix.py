"""Mixes: worked examples, numerical derivatives, sums over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.mhc.helpers import (
    STREAMS,
    assert_gradients,
    close,
    each_ground,
    each_kernel,
    gradients,
    leaf,
    random,
    sizes,
)
from tile_kernels import mhc
from tile_kernels import torch as references
from tile_kernels.runtime.cases import assert_equal_results
from tile_kernels.torch import mhc as mhc_reference

SPLIT = (
    torch.tensor([0.0, 1.0, -1.0, 2.0, 1.0, 2.0, 3.0, 4.0]).view(1, 1, 8),
    torch.tensor([1.0, 2.0, 0.5]),
    torch.tensor([0.0, 0.5, 0.0, 0.0, 0.1, 0.0, 0.0, -1.0]),
)


@pytest.mark.parametrize(
    "split", [references.mhc_pre_split_mixes_ref, mhc_reference.mhc_pre_split_mixes]
)
def test_split_example(split: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    pre, post, comb = split(*SPLIT, 2, 2.0, 0.01)
    assert (pre.shape, post.shape, comb.shape) == ((1, 1, 2, 1), (1, 1, 2, 1), (1, 1, 2, 2))
    close(pre, 0.51, 0.8275744)
    close(post, 0.2384058, 1.9640275)
    close(comb, 0.6, 1.0, 1.5, 1.0)


def test_split_gradient_example() -> None:
    ones = torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 2)
    d_x, d_scale, d_base = mhc_reference.mhc_pre_split_mixes_bwd(*ones, *SPLIT, 2.0)
    close(d_x, 0.25, 0.1491465, 0.4199743, 0.0706509, 0.5, 0.5, 0.5, 0.5)
    close(d_scale, 0.1491465, -0.1393362, 10.0)
    close(d_base, 0.25, 0.1491465, 0.2099872, 0.0353255, 1.0, 1.0, 1.0, 1.0)


def test_head_example() -> None:
    scale, base = torch.tensor([2.0]), torch.tensor([0.0, -2.0])
    for head in (references.mhc_head_compute_mix_ref, mhc_reference.mhc_head_compute_mix):
        close(head(torch.tensor([[[0.0, 1.0]]]), scale, base, 0.01), 0.51, 0.51)
    # And what the head reads with it.
    mix = torch.tensor([[0.51], [0.51]])
    found = references.mhc_pre_apply_mix_ref(STREAMS.bfloat16(), mix)
    assert found.tolist() == [2.046875, 3.0625]


@sizes
@pytest.mark.parametrize("post_mult", [2.0, 0.0])
def test_gradients_of_the_mixes(m: int, post_mult: float) -> None:
    torch.manual_seed(m)
    inputs = [random(2, 3, m * (m + 2)), random(3), random(m * (m + 2))]
    grads = random(2, 3, m, 1), random(2, 3, m, 1), random(2, 3, m, m)

    def split(*inputs: Tensor) -> Tensor:
        parts = references.mhc_pre_split_mixes_ref(*inputs, m, post_mult, 0.01)
        return torch.cat([part.flatten() for part in parts])

    found = mhc_reference.mhc_pre_split_mixes(*inputs, m, post_mult, 0.01)
    torch.testing.assert_close(torch.cat([part.flatten() for part in found]), split(*inputs))
    flat = torch.cat([grad.flatten() for grad in grads])
    found = mhc_reference.mhc_pre_split_mixes_bwd(*grads, *inputs, post_mult)
    assert all(part.isfinite().all() for part in found)
    assert_gradients(found, gradients(split, inputs, flat))

    inputs, grad = [random(2, 3, m), random(1), random(m)], random(2, 3, m)

    def head(*inputs: Tensor) -> Tensor:
        return references.mhc_head_compute_mix_ref(*inputs, 0.01)

    torch.testing.assert_close(mhc_reference.mhc_head_compute_mix(*inputs, 0.01), head(*inputs))
    found = mhc_reference.mhc_head_compute_mix_bwd(grad, *inputs)
    assert_gradients(found, gradients(head, inputs, grad))


@each_ground
def test_gradients_that_are_missing_are_zero(device: str) -> None:
    mixes, scale, base = leaf(5, 8, device=device), leaf(3, device=device), leaf(8, device=device)
    pre, _, _ = mhc.mhc_pre_split_mixes(mixes, scale, base, 2, 2.0, 0.0)
    pre.sum().backward()
    assert mixes.grad is not None
    assert scale.grad is not None
    assert mixes.grad[:, 2:].count_nonzero() == 0
    assert scale.grad[1:].count_nonzero() == 0
    assert mixes.grad[:, :2].count_nonzero() == 10


@each_ground
def test_a_multiplier_of_zero_has_finite_gradients(device: str) -> None:
    mixes, scale, base = leaf(5, 8, device=device), leaf(3, device=device), leaf(8, device=device)
    _, post, _ = mhc.mhc_pre_split_mixes(mixes, scale, base, 2, 0.0, 0.0)
    assert post.count_nonzero() == 0
    post.sum().backward()
    for x in (mixes, scale, base):
        assert x.grad is not None
        assert x.grad.count_nonzero() == 0


@each_kernel
def test_sums_over_tokens_are_accurate(device: str) -> None:
    """A running sum of float32 would be off by a thousand times more."""
    n = 20_000
    mix, grad = torch.rand(n, 4, device=device) + 1, torch.rand(n, 4, device=device)
    scale, base = torch.ones(1, device=device), torch.zeros(4, device=device)
    _, d_scale, d_base = mhc.mhc_head_compute_mix_bwd(grad, mix, scale, base)
    wide = [t.double() for t in (grad, mix, scale, base)]
    _, expected_scale, expected_base = mhc_reference.mhc_head_compute_mix_bwd(*wide)
    torch.testing.assert_close(d_scale.double(), expected_scale, rtol=3e-7, atol=0)
    torch.testing.assert_close(d_base.double(), expected_base, rtol=3e-7, atol=0)


@pytest.mark.gpu
def test_mixes_beyond_32_bits() -> None:
    """The last tokens as if they were alone; the reference would not fit into memory."""
    torch.manual_seed(0)
    n, m = 27_000_001, 8  # 80 mixes each
    count = m * (m + 2)
    mixes = torch.randn(n, count, device="cuda")
    scale, base = torch.randn(3, device="cuda"), torch.randn(count, device="cuda")
    last = slice(n - 1000, n)
    found = mhc.mhc_pre_split_mixes(mixes, scale, base, m, 2.0, 0.01)
    expected = mhc.mhc_pre_split_mixes(mixes[last], scale, base, m, 2.0, 0.01)
    for one, other in zip(found, expected):
        assert_equal_results(one[last], other)
    d_mixes, d_scale, d_base = mhc.mhc_pre_split_mixes_bwd(*found, mixes, scale, base, 2.0)
    grads = [grad[last] for grad in found]
    expected, _, _ = mhc.mhc_pre_split_mixes_bwd(*grads, mixes[last], scale, base, 2.0)
    assert_equal_results(d_mixes[last], expected)
    of_comb = found[2].view(n, m * m).sum(0, dtype=torch.float64)
    torch.testing.assert_close(d_base[2 * m :].double(), of_comb, rtol=1e-4, atol=1.0)
    assert d_scale.isfinite().all()
