from tile_kernels.mhc.apply.op import (
    mhc_pre_apply_mix as mhc_pre_apply_mix,
    mhc_pre_apply_mix_bwd as mhc_pre_apply_mix_bwd,
)
from tile_kernels.mhc.expand.op import (
    expand_to_mhc as expand_to_mhc,
    expand_to_mhc_bwd as expand_to_mhc_bwd,
)
from tile_kernels.mhc.mix.op import (
    mhc_head_compute_mix as mhc_head_compute_mix,
    mhc_head_compute_mix_bwd as mhc_head_compute_mix_bwd,
    mhc_pre_split_mixes as mhc_pre_split_mixes,
    mhc_pre_split_mixes_bwd as mhc_pre_split_mixes_bwd,
)
from tile_kernels.mhc.norm_fn.op import (
    mhc_norm_fn_bwd as mhc_norm_fn_bwd,
    mhc_norm_fn_fwd as mhc_norm_fn_fwd,
)
from tile_kernels.mhc.partials.op import (
    mhc_pre_from_partials as mhc_pre_from_partials,
    mhc_reduce_partials as mhc_reduce_partials,
    mhc_reduce_partials_bwd as mhc_reduce_partials_bwd,
)
from tile_kernels.mhc.post.op import (
    mhc_post as mhc_post,
    mhc_post_bwd as mhc_post_bwd,
    mhc_post_fwd as mhc_post_fwd,
)
from tile_kernels.mhc.post_pre.op import (
    mhc_post_pre as mhc_post_pre,
    mhc_post_pre_and_per_token_cast as mhc_post_pre_and_per_token_cast,
)
from tile_kernels.mhc.pre.op import mhc_pre_big_fuse as mhc_pre_big_fuse, mhc_pre_fwd as mhc_pre_fwd
from tile_kernels.mhc.recompute.op import mhc_multilayer_recompute as mhc_multilayer_recompute
from tile_kernels.mhc.sinkhorn.op import (
    sinkhorn_normalize as sinkhorn_normalize,
    sinkhorn_normalize_bwd as sinkhorn_normalize_bwd,
)
