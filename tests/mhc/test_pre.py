"""Fused operators before a sublayer give the bits and gradients of single ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.mhc.helpers import grounds, sublayer
from tile_kernels import mhc
from tile_kernels.mhc.norm_fn import reference
from tile_kernels.runtime.launch import recording


@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds(
        [(5, 4, 72), (3, 3, 64), (70, 2, 24), (2, 8, 264)],
        [(n, 4, h) for n in (1, 512, 8192) for h in (1280, 2560, 7168)] + [(300, 7, 1288)],
    ),
)
def test_the_fused_operators_are_the_chain(
    backend: str, device: str, n: int, m: int, h: int
) -> None:
    residual, fn, scale, base = sublayer(n, m, h, device)
    numbers = 1e-6, 1e-6, 1e-6, 1.0, 10
    with tile_kernels.backend(backend):
        post, comb, read = mhc.mhc_pre_big_fuse(residual, fn, scale, base, *numbers)
        trained = mhc.mhc_pre_fwd(residual, fn, scale, base, *numbers)
        mixes, mul, s = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)
        pre, post_alone, logits = mhc.mhc_pre_split_mixes(mixes, scale, base, m, 1.0, 1e-6)
        comb_alone = mhc.sinkhorn_normalize(logits, 10, 1e-6)
        read_alone = mhc.mhc_pre_apply_mix(residual, pre)
    chain = read_alone, post_alone, comb_alone, pre, mixes, mul, s, logits
    for one, other in zip((read, post, comb), chain):
        assert torch.equal(one, other)
    for one, other in zip(trained, chain):
        assert torch.equal(one, other)


def chain_with_gradients(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """By the single operators, to which autograd adds up the gradient of the residual."""
    mixes = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)[0]
    pre, post, logits = mhc.mhc_pre_split_mixes(mixes, scale, base, residual.shape[-2], 2.0, 0.01)
    return mhc.mhc_pre_apply_mix(residual, pre), post, mhc.sinkhorn_normalize(logits, 10, 1e-6)


@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds([(5, 4, 72), (2, 3, 64)], [(1, 4, 1280), (4096, 4, 7168), (300, 7, 1288)]),
)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_the_fused_operator(
    backend: str, device: str, n: int, m: int, h: int, compiled: bool
) -> None:
    """Those of the parameters to the bit; two parts of the residual's are added before rounding."""

    def fused(*given: Tensor) -> tuple[Tensor, ...]:
        return mhc.mhc_pre_fwd(*given, 1e-6, 0.01, 1e-6, 2.0, 10)[:3]

    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(fused, fullgraph=True, backend="aot_eager")
    inputs = [tensor.requires_grad_() for tensor in sublayer(n, m, h, device)]
    with tile_kernels.backend(backend):
        results = fused(*inputs)
        grads = [torch.randn_like(result) for result in results]
        found = torch.autograd.grad(results, inputs, grads)
        expected = torch.autograd.grad(chain_with_gradients(*inputs), inputs, grads)
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=2**-6)
    for one, other in zip(found[1:], expected[1:]):
        assert torch.equal(one, other)


def test_what_is_kept_has_no_gradient() -> None:
    inputs = [tensor.requires_grad_() for tensor in sublayer(3, 2, 24, "cpu")]
    results = mhc.mhc_pre_fwd(*inputs, 1e-6, 0.01, 1e-6, 2.0, 10)
    assert [result.requires_grad for result in results] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("function", "launches"),
    [(mhc.mhc_norm_fn_fwd, 2), (mhc.mhc_pre_big_fuse, 2), (mhc.mhc_pre_fwd, 2)],
)
def test_launches(function: Any, launches: int) -> None:
    """As documented: of the projection, of all before a sublayer, and of that in training."""
    arguments = [tensor.to("meta") for tensor in sublayer(4096, 4, 64, "cpu")]
    numbers = 1e-6, 1e-6, 1e-6, 1.0, 10
    given = (*arguments[:2], 1e-6) if function is mhc.mhc_norm_fn_fwd else (*arguments, *numbers)
    with recording() as requests:
        function(*given)
    assert len(requests) == launches


def test_second_import_paths() -> None:
    from tile_kernels.mhc import multilayer_recompute_kernel, norm_fn_kernel, post_kernel

    assert norm_fn_kernel.round_to_tf32 is reference.round_to_tf32
    from tile_kernels.modeling.mhc import ops

    assert post_kernel.mhc_post_fwd is ops.mhc_post_fwd
    assert post_kernel.mhc_post_bwd is ops.mhc_post_bwd
    assert multilayer_recompute_kernel.mhc_multilayer_recompute is mhc.mhc_multilayer_recompute
