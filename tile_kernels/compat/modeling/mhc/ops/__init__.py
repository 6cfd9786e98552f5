"""The steps of mHC, each differentiable, with the gradient of the residual shared between them.

For those who come with code that uses these names: the gradient is shared through an attribute of
the residual's storage, which is only right if nothing else reads the residual. New code has
`tile_kernels.modeling.mhc`.
"""

from tile_kernels.compat.modeling.mhc.ops.expand import expand_to_mhc
from tile_kernels.compat.modeling.mhc.ops.head_compute_mix import mhc_head_compute_mix
from tile_kernels.compat.modeling.mhc.ops.multilayer_recompute import mhc_multilayer_recompute
from tile_kernels.compat.modeling.mhc.ops.norm_fn import mhc_pre_norm_fn
from tile_kernels.compat.modeling.mhc.ops.post import mhc_post, mhc_post_bwd, mhc_post_fwd
from tile_kernels.compat.modeling.mhc.ops.pre_apply_mix import mhc_pre_apply_mix
from tile_kernels.compat.modeling.mhc.ops.pre_big_fuse import mhc_pre_big_fuse
from tile_kernels.compat.modeling.mhc.ops.pre_split_mixes import mhc_pre_split_mixes
from tile_kernels.compat.modeling.mhc.ops.sinkhorn import sinkhorn_normalize

__all__ = [
    "expand_to_mhc",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]
