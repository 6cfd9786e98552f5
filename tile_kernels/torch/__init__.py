"""The PyTorch oracles: plain, readable, the definition of right. They run on any device."""

from tile_kernels.torch import quant
from tile_kernels.torch.cast import cast, cast_back
from tile_kernels.torch.e5m6 import cast_back_from_e5m6, cast_to_e5m6
from tile_kernels.torch.fused import expand_to_fused, expand_to_fused_with_sf, reduce_fused
from tile_kernels.torch.hashing import hash_gate
from tile_kernels.torch.mapping import get_fused_mapping
from tile_kernels.torch.mhc import (
    expand_to_mhc_ref,
    mhc_head_compute_mix_ref,
    mhc_post_ref,
    mhc_pre_apply_mix_ref,
    mhc_pre_norm_fn_ref,
    mhc_pre_split_mixes_ref,
    sinkhorn_normalize_ref,
)
from tile_kernels.torch.moe import (
    aux_fi,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
    normalize_weight,
)
from tile_kernels.torch.per_channel_cast_fused import per_channel_cast_fused
from tile_kernels.torch.swiglu import swiglu_backward, swiglu_forward
from tile_kernels.torch.topk import (
    gate_scores,
    stable_topk,
    top2_sum_gate,
    topk_sum_and_topk_group_idx,
    topk_weights,
    topk_weights_backward,
)
from tile_kernels.transpose.reference import batched_transpose, transpose

__all__ = [
    "aux_fi",
    "batched_transpose",
    "cast",
    "cast_back",
    "cast_back_from_e5m6",
    "cast_to_e5m6",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "expand_to_mhc_ref",
    "gate_scores",
    "get_fused_mapping",
    "group_count",
    "hash_gate",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "mhc_head_compute_mix_ref",
    "mhc_post_ref",
    "mhc_pre_apply_mix_ref",
    "mhc_pre_norm_fn_ref",
    "mhc_pre_split_mixes_ref",
    "normalize_weight",
    "per_channel_cast_fused",
    "quant",
    "reduce_fused",
    "sinkhorn_normalize_ref",
    "stable_topk",
    "swiglu_backward",
    "swiglu_forward",
    "top2_sum_gate",
    "topk_sum_and_topk_group_idx",
    "topk_weights",
    "topk_weights_backward",
    "transpose",
]
