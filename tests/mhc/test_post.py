"""Reading from and writing to streams: worked examples and numerical derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.mhc.helpers import STREAMS, assert_gradients, gradients, random, sizes
from tile_kernels import torch as references
from tile_kernels.torch import mhc as mhc_reference

POST, COMB = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])


def test_read_and_write_examples() -> None:
    mix = torch.tensor([[0.25], [0.5]])
    for read in (references.mhc_pre_apply_mix_ref, mhc_reference.mhc_pre_apply_mix):
        found = read(STREAMS.bfloat16(), mix)
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [1.75, 2.5]
    output = torch.tensor([10.0, 20.0])
    for write in (references.mhc_post_ref, mhc_reference.mhc_post):
        found = write(output.bfloat16(), STREAMS.bfloat16(), POST, COMB)
        assert found.dtype == torch.bfloat16
        assert found.tolist() == [[12.25, 23.5], [6.75, 12.5]]
    d_x, d_residual, d_post, d_comb = mhc_reference.mhc_post_bwd(
        output, STREAMS, POST, COMB, torch.eye(2)
    )
    assert (d_x.tolist(), d_residual.tolist()) == ([1.0, 0.5], [[0.75, 0.25], [0.5, 0.5]])
    assert (d_post.tolist(), d_comb.tolist()) == ([[10.0], [20.0]], [[1.0, 2.0], [3.0, 4.0]])


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

    assert_gradients([mhc_reference.expand_to_mhc_bwd(grad)], gradients(expand, [hidden], grad))
    inputs = [residual, mix]
    torch.testing.assert_close(mhc_reference.mhc_pre_apply_mix(*inputs), read(*inputs))
    expected = gradients(read, inputs, x)
    assert_gradients(mhc_reference.mhc_pre_apply_mix_bwd(x, *inputs), expected)
    there = grad.clone()
    added, grad_mix = mhc_reference.mhc_pre_apply_mix_bwd(x, *inputs, there)
    assert added is there
    assert_gradients([added, grad_mix], [grad + expected[0], expected[1]])
    inputs = [x, residual, mix, comb]
    torch.testing.assert_close(mhc_reference.mhc_post(*inputs), write(*inputs))
    assert_gradients(mhc_reference.mhc_post_bwd(*inputs, grad), gradients(write, inputs, grad))
    assert torch.autograd.gradcheck(write, [t.clone().requires_grad_() for t in inputs])
