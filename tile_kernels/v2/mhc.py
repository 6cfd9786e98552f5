"""Hyper-connections into the caller's buffers: tokens are flat, results are written, not returned.

The arithmetic is that of the operators of `tile_kernels.mhc` with the same steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.mhc.post.op import mhc_post_bwd as mhc_post_bwd, mhc_post_fwd as mhc_post_fwd
from tile_kernels.mhc.recompute.op import mhc_multilayer_recompute as mhc_multilayer_recompute
from tile_kernels.runtime import checks


# ---- expansion, weighted sum ---------------------------------------------------------------------


def expand_to_mhc_fwd(x: Tensor, o: Tensor) -> None:
    """`x` `[n, h]` to every stream of `o` `[n, m, h]`."""
    mhc.expand_to_mhc(x, o.shape[-2], out=o)


def expand_to_mhc_bwd(o_grad: Tensor, x_grad: Tensor) -> None:
    """The sum of the streams of `o_grad` to `x_grad`."""
    mhc.expand_to_mhc_bwd(o_grad, out=x_grad)


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, o: Tensor) -> None:
    """The streams of `x` `[n, m, h]`, weighted by `mix` `[n, m]`, to `o` `[n, h]`."""
    mhc.mhc_pre_apply_mix(x, mix[..., None], out=o)


def mhc_pre_apply_mix_bwd(o_grad: Tensor, x: Tensor, mix: Tensor, x_grad: Tensor) -> Tensor:
    """Adds the gradient of `x` to `x_grad`; returns that of `mix`, `[n, m]`."""
    return mhc.mhc_pre_apply_mix_bwd(o_grad, x, mix[..., None], x_grad)[1].view(mix.shape)


# ---- mixes --------------------------------------------------------------------------------------


def mhc_head_compute_mix_fwd(
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    output_mix: Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,  # noqa: ARG001
) -> None:
    """`tile_kernels.mhc.mhc_head_compute_mix`; `token_block_size` has no effect."""
    mhc.mhc_head_compute_mix(input_mix, mhc_scale, mhc_base, mhc_pre_eps, out=output_mix)


def mhc_head_compute_mix_bwd(
    output_mix_grad: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mix_grad: Tensor,
    mhc_scale_grad_partial: Tensor,
    mhc_base_grad_partial: Tensor,
    num_sms: int,  # noqa: ARG001
    token_block_size: int = 0,  # noqa: ARG001
) -> None:
    """The gradients; of the partial sums the first has all, the others are zero."""
    for partial in (mhc_scale_grad_partial, mhc_base_grad_partial):
        partial[1:].zero_()
    buffers = input_mix_grad, mhc_scale_grad_partial[0], mhc_base_grad_partial[0]
    mhc.mhc_head_compute_mix_bwd(output_mix_grad, input_mix, mhc_scale, mhc_base, out=buffers)


def mhc_pre_split_mixes_fwd(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    pre_layer_mix: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """`tile_kernels.mhc.mhc_pre_split_mixes`."""
    n, m = pre_layer_mix.shape
    buffers = pre_layer_mix[..., None], post_layer_mix[..., None], comb_res_mix.view(n, m, m)
    mhc.mhc_pre_split_mixes(
        input_mixes, mhc_scale, mhc_base, m, mhc_post_mult_value, mhc_pre_eps, out=buffers
    )


def mhc_pre_split_mixes_bwd(
    pre_layer_mix_grad: Tensor,
    post_layer_mix_grad: Tensor,
    comb_res_mix_grad: Tensor,
    input_mixes: Tensor,
    post_layer_mix: Tensor,  # noqa: ARG001
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mixes_grad: Tensor,
    mhc_scale_grad: Tensor,
    mhc_base_grad: Tensor,
    mhc_post_mult_value: float,
) -> None:
    """`tile_kernels.mhc.mhc_pre_split_mixes_bwd`, which computes `post_layer_mix` again."""
    n, m = pre_layer_mix_grad.shape
    mhc.mhc_pre_split_mixes_bwd(
        pre_layer_mix_grad[..., None], post_layer_mix_grad[..., None],
        comb_res_mix_grad.view(n, m, m), input_mixes, mhc_scale, mhc_base, mhc_post_mult_value,
        out=(input_mixes_grad, mhc_scale_grad, mhc_base_grad),
    )  # fmt: skip


def mhc_sinkhorn_fwd(
    comb_res_mix: Tensor, comb_res_mix_out: Tensor, repeat: int, eps: float
) -> None:
    """`tile_kernels.mhc.sinkhorn_normalize`."""
    mhc.sinkhorn_normalize(comb_res_mix, repeat, eps, out=comb_res_mix_out)


def mhc_sinkhorn_bwd(
    grad_output: Tensor, x: Tensor, grad_input: Tensor, repeat: int, eps: float
) -> None:
    """`tile_kernels.mhc.sinkhorn_normalize_bwd`."""
    mhc.sinkhorn_normalize_bwd(grad_output, x, repeat, eps, out=grad_input)


# ---- projection ---------------------------------------------------------------------------------


def _check_merge(owner: str, fn: Tensor, normw: Tensor, **others: Tensor) -> None:
    """`normw` belongs to the rows of `fn`; the others have the shape that their names say."""
    with checks.named(owner):
        checks.tensor("fn", fn, ("mixes", "hidden"))
        for name, value in {"normw": normw, **others}.items():
            shape = tuple(fn.shape[-1:] if name.startswith("normw") else fn.shape)
            dims = ("mixes", "hidden")[-len(shape) :]
            checks.tensor(name, value, dims, shape=shape)


def mhc_fn_normw_merge_fwd(fn: Tensor, normw: Tensor, out_fn: Tensor) -> None:
    """`fn * normw`."""
    _check_merge("mhc_fn_normw_merge_fwd", fn, normw, out_fn=out_fn)
    torch.mul(fn, normw, out=out_fn)


def mhc_fn_normw_merge_bwd(
    fn: Tensor, normw: Tensor, out_fn_grad: Tensor, fn_grad: Tensor, normw_grad: Tensor
) -> None:
    """Adds the gradients of `fn` and of `normw` to the buffers."""
    buffers = {"out_fn_grad": out_fn_grad, "fn_grad": fn_grad, "normw_grad": normw_grad}
    _check_merge("mhc_fn_normw_merge_bwd", fn, normw, **buffers)
    fn_grad.add_(out_fn_grad * normw)
    normw_grad.add_((out_fn_grad * fn).sum(0))


def _check_splits(name: str, n_splits: int, parts: Tensor) -> None:
    if n_splits != parts.shape[0]:
        raise ValueError(
            f"{name}: n_splits must be the first dimension of the parts, {parts.shape[0]}, got "
            f"{n_splits}"
        )


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """`tile_kernels.mhc.mhc_reduce_partials`."""
    _check_splits("mhc_reduce_partials_and_rmsnorm_fwd", n_splits, out_mul_splitted)
    buffers = (out, out_mul, sqrsum)
    mhc.mhc_reduce_partials(out_mul_splitted, sqrsum_splitted, rms_group_size, rms_eps, out=buffers)


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out_mul_grad: Tensor,
    sqrsum_grad: Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """`tile_kernels.mhc.mhc_reduce_partials_bwd`."""
    buffers = (out_mul_grad, sqrsum_grad)
    mhc.mhc_reduce_partials_bwd(out_grad, out_mul, sqrsum, rms_group_size, rms_eps, out=buffers)


def mhc_pre_big_fuse_fwd(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """`tile_kernels.mhc.mhc_pre_from_partials`: all behind a projection that was made elsewhere."""
    _check_splits("mhc_pre_big_fuse_fwd", n_splits, gemm_out_mul)
    n, m, _ = residual.shape
    mhc.mhc_pre_from_partials(
        gemm_out_mul, gemm_out_sqrsum, mhc_scale, mhc_base, residual, rms_eps, mhc_pre_eps,
        mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat,
        out=(post_mix.view(n, m, 1), comb_mix.view(n, m, m), layer_input),
    )  # fmt: skip
