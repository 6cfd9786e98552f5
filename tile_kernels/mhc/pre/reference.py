"""References of all that comes before a sublayer."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.mhc.apply.reference import mhc_pre_apply_mix, mhc_pre_apply_mix_bwd
from tile_kernels.mhc.mix.reference import mhc_pre_split_mixes, mhc_pre_split_mixes_bwd
from tile_kernels.mhc.norm_fn.reference import mhc_norm_fn_bwd, mhc_norm_fn_fwd
from tile_kernels.mhc.sinkhorn.reference import sinkhorn_normalize, sinkhorn_normalize_bwd

Pre = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def mhc_pre_fwd(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> Pre:
    """Layer input, `post`, `comb`, and what gradients need: see `tile_kernels.mhc.mhc_pre_fwd`."""
    mixes, mul, s = mhc_norm_fn_fwd(residual, fn, rms_eps)
    pre, post, logits = mhc_pre_split_mixes(
        mixes, mhc_scale, mhc_base, residual.shape[-2], mhc_post_mult_value, mhc_pre_eps
    )
    comb = sinkhorn_normalize(logits, sinkhorn_repeat, mhc_sinkhorn_eps)
    return mhc_pre_apply_mix(residual, pre), post, comb, pre, mixes, mul, s, logits


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    """`post`, `comb` and layer input of `mhc_pre_fwd`; `n_splits` has no effect."""
    layer_input, post, comb, *_ = mhc_pre_fwd(
        residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
        mhc_post_mult_value, sinkhorn_repeat,
    )  # fmt: skip
    return post, comb, layer_input


def mhc_pre_bwd(
    d_layer_input: Tensor,
    d_post: Tensor,
    d_comb: Tensor,
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    pre_mix: Tensor,
    mixes: Tensor,
    mul: Tensor,
    s: Tensor,
    logits: Tensor,
    rms_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    d_residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the four tensors of `mhc_pre_fwd`, by those of its four steps.

    That of the residual is added to `d_residual`, in place, where given.
    """
    total, d_pre = mhc_pre_apply_mix_bwd(d_layer_input, residual, pre_mix, d_residual)
    d_logits = sinkhorn_normalize_bwd(d_comb, logits, sinkhorn_repeat, mhc_sinkhorn_eps)
    d_mixes, d_scale, d_base = mhc_pre_split_mixes_bwd(
        d_pre, d_post, d_logits, mixes, mhc_scale, mhc_base, mhc_post_mult_value
    )
    total, d_fn = mhc_norm_fn_bwd(d_mixes, residual, fn, mul, s, rms_eps, total)
    return total, d_fn, d_scale, d_base
