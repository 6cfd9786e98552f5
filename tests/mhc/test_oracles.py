"""The oracles of mHC against worked examples, numerical derivatives and properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tile_kernels import torch as references
from tile_kernels.torch import mhc as oracles

F64 = torch.float64
sizes = pytest.mark.parametrize("m", range(1, 9))


def close(found: Tensor, *expected: float, atol: float = 2e-7) -> None:
    """To the digits that the examples give."""
    torch.testing.assert_close(
        found.flatten().float(), torch.tensor(expected), rtol=3e-7, atol=atol
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


# ---- worked examples ----------------------------------------------------------------------------


def test_expand_example() -> None:
    hidden = torch.tensor([0.0, 1.0, 2.0])
    assert references.expand_to_mhc_ref(hidden, 2).tolist() == [[0, 1, 2], [0, 1, 2]]
    grad = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert oracles.expand_to_mhc_bwd(grad).tolist() == [5, 7, 9]
    several = references.expand_to_mhc_ref(torch.arange(12).view(2, 3, 2), 4)
    assert several.shape == (2, 3, 4, 2)
    assert several.is_contiguous()


X = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 2, 2)
FN = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])


def test_norm_fn_example() -> None:
    close(references.mhc_pre_norm_fn_ref(X, FN, None, 1e-6), 0.3651484, 1.8257418)
    weight = torch.tensor([2.0, 1.0, 1.0, 0.0])
    close(references.mhc_pre_norm_fn_ref(X, FN, weight, 1e-6), 0.7302967, 1.2780193)


def test_norm_fn_gradient_example() -> None:
    residual, fn = X.bfloat16().requires_grad_(), FN.clone().requires_grad_()
    mixes = references.mhc_pre_norm_fn_ref(residual, fn, None, 1e-6)
    assert mixes.shape == (1, 1, 2)
    mixes.backward(torch.tensor([1.0, 0.0]).view(1, 1, 2))
    assert fn.grad is not None
    assert residual.grad is not None
    close(fn.grad[0], 0.3651484, 0.7302967, 1.0954452, 1.4605935)
    assert fn.grad[1].tolist() == [0, 0, 0, 0]
    expected = (0.3535156, -0.0242920, -0.0366211, -0.0485840)
    close(residual.grad, *expected, atol=1e-7)


def test_norm_fn_takes_float32_and_no_tokens() -> None:
    with pytest.raises(TypeError, match="mhc_fn must be float32"):
        references.mhc_pre_norm_fn_ref(X, FN.double(), None, 1e-6)
    empty = references.mhc_pre_norm_fn_ref(torch.zeros(2, 0, 2, 2), FN, torch.ones(4), 1e-6)
    assert empty.shape == (2, 0, 2)


SPLIT = (
    torch.tensor([0.0, 1.0, -1.0, 2.0, 1.0, 2.0, 3.0, 4.0]).view(1, 1, 8),
    torch.tensor([1.0, 2.0, 0.5]),
    torch.tensor([0.0, 0.5, 0.0, 0.0, 0.1, 0.0, 0.0, -1.0]),
)


@pytest.mark.parametrize("split", [references.mhc_pre_split_mixes_ref, oracles.mhc_pre_split_mixes])
def test_split_example(split: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    pre, post, comb = split(*SPLIT, 2, 2.0, 0.01)
    assert (pre.shape, post.shape, comb.shape) == ((1, 1, 2, 1), (1, 1, 2, 1), (1, 1, 2, 2))
    close(pre, 0.51, 0.8275744)
    close(post, 0.2384058, 1.9640275)
    close(comb, 0.6, 1.0, 1.5, 1.0)


def test_split_gradient_example() -> None:
    ones = torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 2)
    d_x, d_scale, d_base = oracles.mhc_pre_split_mixes_bwd(*ones, *SPLIT, 2.0)
    close(d_x, 0.25, 0.1491465, 0.4199743, 0.0706509, 0.5, 0.5, 0.5, 0.5)
    close(d_scale, 0.1491465, -0.1393362, 10.0)
    close(d_base, 0.25, 0.1491465, 0.2099872, 0.0353255, 1.0, 1.0, 1.0, 1.0)


LOGITS = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])


@pytest.mark.parametrize(
    "normalize", [references.sinkhorn_normalize_ref, oracles.sinkhorn_normalize]
)
def test_sinkhorn_example(normalize: Callable[..., Tensor]) -> None:
    close(normalize(LOGITS, 1), 0.3333333, 0.5999994, 0.6666653, 0.3999998)
    close(normalize(LOGITS, 2), 0.3636363, 0.6315780, 0.6363627, 0.3684211)
    close(normalize(LOGITS), 0.3660253, 0.6339737, 0.6339737, 0.3660254)


def test_sinkhorn_gradient_example() -> None:
    grad = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = oracles.sinkhorn_normalize_bwd(grad, LOGITS, 2)
    close(found, 0.1239665, -0.1239665, -0.1198343, 0.1198343)


STREAMS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
POST, COMB = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])


def test_read_and_write_examples() -> None:
    mix = torch.tensor([[0.25], [0.5]])
    for read in (references.mhc_pre_apply_mix_ref, oracles.mhc_pre_apply_mix):
        found = read(STREAMS.bfloat16(), mix)
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [1.75, 2.5]
    output = torch.tensor([10.0, 20.0])
    for write in (references.mhc_post_ref, oracles.mhc_post):
        found = write(output.bfloat16(), STREAMS.bfloat16(), POST, COMB)
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [[12.25, 23.5], [6.75, 12.5]]
    d_x, d_residual, d_post, d_comb = oracles.mhc_post_bwd(
        output, STREAMS, POST, COMB, torch.eye(2)
    )
    assert (d_x.tolist(), d_residual.tolist()) == ([1.0, 0.5], [[0.75, 0.25], [0.5, 0.5]])
    assert (d_post.tolist(), d_comb.tolist()) == ([[10.0], [20.0]], [[1.0, 2.0], [3.0, 4.0]])


def test_head_example() -> None:
    scale, base = torch.tensor([2.0]), torch.tensor([0.0, -2.0])
    for head in (references.mhc_head_compute_mix_ref, oracles.mhc_head_compute_mix):
        close(head(torch.tensor([[[0.0, 1.0]]]), scale, base, 0.01), 0.51, 0.51)
    # And what the head reads with it.
    mix = torch.tensor([[0.51], [0.51]])
    found = references.mhc_pre_apply_mix_ref(STREAMS.bfloat16(), mix)
    assert found.tolist() == [2.046875, 3.0625]


# ---- gradients in float64 -----------------------------------------------------------------------


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """By autograd."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*inputs), inputs, grad))


def assert_gradients(found: tuple[Tensor, ...] | list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@sizes
def test_gradients_of_the_streams(m: int) -> None:
    torch.manual_seed(m)
    hidden, x, residual = random(2, 3, 5), random(2, 3, 5), random(2, 3, m, 5)
    mix, comb, grad = random(2, 3, m, 1), random(2, 3, m, m), random(2, 3, m, 5)

    def expand(hidden: Tensor) -> Tensor:
        return references.expand_to_mhc_ref(hidden, m)

    def read(x: Tensor, mix: Tensor) -> Tensor:
        return (x * mix).sum(-2)

    def write(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return post * x.unsqueeze(-2) + comb.mT @ residual

    assert_gradients([oracles.expand_to_mhc_bwd(grad)], gradients(expand, [hidden], grad))
    inputs = [residual, mix]
    torch.testing.assert_close(oracles.mhc_pre_apply_mix(*inputs), read(*inputs))
    expected = gradients(read, inputs, x)
    assert_gradients(oracles.mhc_pre_apply_mix_bwd(x, *inputs), expected)
    there = grad.clone()
    added, grad_mix = oracles.mhc_pre_apply_mix_bwd(x, *inputs, there)
    assert added is there
    assert_gradients([added, grad_mix], [grad + expected[0], expected[1]])
    inputs = [x, residual, mix, comb]
    torch.testing.assert_close(oracles.mhc_post(*inputs), write(*inputs))
    assert_gradients(oracles.mhc_post_bwd(*inputs, grad), gradients(write, inputs, grad))
    assert torch.autograd.gradcheck(write, [t.clone().requires_grad_() for t in inputs])


@sizes
@pytest.mark.parametrize("post_mult", [2.0, 0.0])
def test_gradients_of_the_mixes(m: int, post_mult: float) -> None:
    torch.manual_seed(m)
    inputs = [random(2, 3, m * (m + 2)), random(3), random(m * (m + 2))]
    grads = random(2, 3, m, 1), random(2, 3, m, 1), random(2, 3, m, m)

    def split(*inputs: Tensor) -> Tensor:
        parts = references.mhc_pre_split_mixes_ref(*inputs, m, post_mult, 0.01)
        return torch.cat([part.flatten() for part in parts])

    found = oracles.mhc_pre_split_mixes(*inputs, m, post_mult, 0.01)
    torch.testing.assert_close(torch.cat([part.flatten() for part in found]), split(*inputs))
    flat = torch.cat([grad.flatten() for grad in grads])
    found = oracles.mhc_pre_split_mixes_bwd(*grads, *inputs, post_mult)
    assert all(part.isfinite().all() for part in found)
    assert_gradients(found, gradients(split, inputs, flat))

    inputs, grad = [random(2, 3, m), random(1), random(m)], random(2, 3, m)

    def head(*inputs: Tensor) -> Tensor:
        return references.mhc_head_compute_mix_ref(*inputs, 0.01)

    torch.testing.assert_close(oracles.mhc_head_compute_mix(*inputs, 0.01), head(*inputs))
    found = oracles.mhc_head_compute_mix_bwd(grad, *inputs)
    assert_gradients(found, gradients(head, inputs, grad))


@sizes
@pytest.mark.parametrize("repeat", [1, 2, 10])
def test_gradient_of_sinkhorn(m: int, repeat: int) -> None:
    torch.manual_seed(m)
    x, grad = random(3, m, m), random(3, m, m)

    def normalize(x: Tensor) -> Tensor:
        return references.sinkhorn_normalize_ref(x, repeat, 1e-6)

    torch.testing.assert_close(oracles.sinkhorn_normalize(x, repeat), normalize(x))
    assert_gradients(
        [oracles.sinkhorn_normalize_bwd(grad, x, repeat)], gradients(normalize, [x], grad)
    )
    if repeat < 10:
        assert torch.autograd.gradcheck(normalize, x.requires_grad_())


def test_float32_gradients_are_near_those_in_float64() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(200, 4, 4), torch.randn(200, 4, 4)
    found = oracles.sinkhorn_normalize_bwd(grad, x)
    expected = oracles.sinkhorn_normalize_bwd(grad.double(), x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-6)


def test_no_tokens() -> None:
    assert oracles.sinkhorn_normalize(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    assert oracles.sinkhorn_normalize_bwd(torch.zeros(0, 3, 3), torch.zeros(0, 3, 3)).numel() == 0
    grads = torch.zeros(0, 2, 1), torch.zeros(0, 2, 1), torch.zeros(0, 2, 2)
    found = oracles.mhc_pre_split_mixes_bwd(
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
    y = oracles.sinkhorn_normalize(x.float())
    assert (y > 0).all()
    torch.testing.assert_close(y.sum(-2), torch.ones(y.shape[:-1]), rtol=0, atol=1e-5)
    enough = oracles.sinkhorn_normalize(x, 400, 1e-12)
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
        expected = oracles.sinkhorn_normalize(x, repeat)[:, order[0]][..., order[1]]
        torch.testing.assert_close(oracles.sinkhorn_normalize(moved, repeat), expected)
    # A number on top of a row changes nothing.
    shifted = x + torch.randn(size, 1, dtype=F64, generator=generator)
    torch.testing.assert_close(oracles.sinkhorn_normalize(shifted), oracles.sinkhorn_normalize(x))


@properties
@given(matrices())
def test_gradients_are_orthogonal_to_what_changes_nothing(x: Tensor) -> None:
    """A number on top of a row of logits changes nothing; with `eps` 0 and many steps, nor does
    one on top of a column. So the gradient sums to zero along both."""
    grad = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = oracles.sinkhorn_normalize_bwd(grad, x)
    zeros = torch.zeros(x.shape[:-1], dtype=F64)
    torch.testing.assert_close(found.sum(-1), zeros, rtol=0, atol=1e-10)
    found = oracles.sinkhorn_normalize_bwd(grad, x, 400, 0.0)
    torch.testing.assert_close(found.sum(-2), zeros, rtol=0, atol=1e-6)
    # A multiple of the last divisors has no effect on columns that are divided by them.
    y = oracles.sinkhorn_normalize(x, 1, 0.0)
    through = oracles.sinkhorn_normalize_bwd(torch.ones_like(y), x, 1, 0.0)
    torch.testing.assert_close(through, torch.zeros_like(x), rtol=0, atol=1e-10)


@properties
@given(matrices(80.0))
def test_far_logits_stay_finite(x: Tensor) -> None:
    x = x.float()
    y = oracles.sinkhorn_normalize(x)
    assert y.isfinite().all()
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(-2), torch.ones(y.shape[:-1]), rtol=0, atol=0.5)
    assert oracles.sinkhorn_normalize_bwd(torch.ones_like(x), x).isfinite().all()


def test_rows_converge_as_documented() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, 4, 4)
    errors = [
        (oracles.sinkhorn_normalize(x, repeat).sum(-1) - 1).abs().max().item()
        for repeat in (1, 2, 5, 10, 20)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 2e-2
    assert errors[4] < 1e-3
