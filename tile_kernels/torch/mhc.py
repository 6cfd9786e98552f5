"""References of mHC at their import path in TileKernels.

`*_ref` are formulas in plain PyTorch, differentiable; the others define the operators to the bit.
"""

from tile_kernels.mhc.apply.reference import (
    mhc_pre_apply_mix,
    mhc_pre_apply_mix_bwd,
    mhc_pre_apply_mix_ref,
)
from tile_kernels.mhc.expand.reference import expand_to_mhc, expand_to_mhc_bwd, expand_to_mhc_ref
from tile_kernels.mhc.mix.reference import (
    mhc_head_compute_mix,
    mhc_head_compute_mix_bwd,
    mhc_head_compute_mix_ref,
    mhc_pre_split_mixes,
    mhc_pre_split_mixes_bwd,
    mhc_pre_split_mixes_ref,
)
from tile_kernels.mhc.norm_fn.reference import mhc_norm_fn_bwd, mhc_norm_fn_fwd, mhc_pre_norm_fn_ref
from tile_kernels.mhc.post.reference import mhc_post, mhc_post_bwd, mhc_post_ref
from tile_kernels.mhc.post_pre.reference import mhc_post_pre, mhc_post_pre_and_per_token_cast
from tile_kernels.mhc.pre.reference import mhc_pre_big_fuse, mhc_pre_fwd
from tile_kernels.mhc.recompute.reference import mhc_multilayer_recompute
from tile_kernels.mhc.sinkhorn.reference import (
    sinkhorn_normalize,
    sinkhorn_normalize_bwd,
    sinkhorn_normalize_ref,
)

mhc_post_fwd = mhc_post

__all__ = [
    "expand_to_mhc",
    "expand_to_mhc_bwd",
    "expand_to_mhc_ref",
    "mhc_head_compute_mix",
    "mhc_head_compute_mix_bwd",
    "mhc_head_compute_mix_ref",
    "mhc_multilayer_recompute",
    "mhc_norm_fn_bwd",
    "mhc_norm_fn_fwd",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_post_pre",
    "mhc_post_pre_and_per_token_cast",
    "mhc_post_ref",
    "mhc_pre_apply_mix",
    "mhc_pre_apply_mix_bwd",
    "mhc_pre_apply_mix_ref",
    "mhc_pre_big_fuse",
    "mhc_pre_fwd",
    "mhc_pre_norm_fn_ref",
    "mhc_pre_split_mixes",
    "mhc_pre_split_mixes_bwd",
    "mhc_pre_split_mixes_ref",
    "sinkhorn_normalize",
    "sinkhorn_normalize_bwd",
    "sinkhorn_normalize_ref",
]
