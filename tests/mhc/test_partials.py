"""What follows a projection in parts: the fused form against the single steps, gradients."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import mhc
from tile_kernels.mhc.partials.cases import CASES


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("label", ["3x5x2x40", "16x3x4x1064", "7x3x8x72"])
def test_fused_has_the_bits_of_the_steps(label: str, ground: tuple[str, str]) -> None:
    backend, device = ground
    sample = next(s for s in CASES["mhc_pre_from_partials"].small if s.label == label)
    a = sample.build(device)
    m, h = a["residual"].shape[1:]
    with tile_kernels.backend(backend):
        fused = mhc.mhc_pre_from_partials(**a)
        mixes, *_ = mhc.mhc_reduce_partials(
            a["gemm_out_mul"][:, :, None], a["gemm_out_sqrsum"][:, :, None], m * h, a["rms_eps"]
        )
        pre, post, logits = mhc.mhc_pre_split_mixes(
            mixes, a["mhc_scale"], a["mhc_base"], m, a["mhc_post_mult_value"], a["mhc_pre_eps"]
        )
        comb = mhc.sinkhorn_normalize(logits, a["sinkhorn_repeat"], a["mhc_sinkhorn_eps"])
        layer_input = mhc.mhc_pre_apply_mix(a["residual"], pre)
    for one, other in zip(fused, (post, comb, layer_input)):
        assert torch.equal(one, other)


def test_gradients_of_the_parts() -> None:
    """Against autograd in float64."""
    torch.manual_seed(2)
    mul = torch.randn(3, 4, 2, 5, requires_grad=True)
    squares = (1 + torch.rand(3, 4, 2)).requires_grad_()
    grad = torch.randn(4, 5)
    mhc.mhc_reduce_partials(mul, squares, 16, 1e-3)[0].backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (mul, squares)]
    inverse = torch.rsqrt(wide[1].sum(0) / 16 + 1e-3)
    (wide[0].sum(0) * inverse[..., None]).sum(1).backward(grad.double())
    for one, other in zip((mul, squares), wide):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-6)
