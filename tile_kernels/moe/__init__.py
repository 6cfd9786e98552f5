"""Expert gating and token routing."""

from tile_kernels.moe.counting import aux_fi, group_count
from tile_kernels.moe.fused import expand_to_fused, expand_to_fused_with_sf, reduce_fused
from tile_kernels.moe.gating import topk_gate, topk_sum_and_topk_group_idx
from tile_kernels.moe.hashing import hash_gate
from tile_kernels.moe.indices import inplace_unique_group_indices, mask_indices_by_tp
from tile_kernels.moe.mapping import get_fused_mapping
from tile_kernels.moe.routing import top2_sum_gate, topk_weights
from tile_kernels.moe.weights import normalize_weight

__all__ = [
    "aux_fi",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "get_fused_mapping",
    "group_count",
    "hash_gate",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "normalize_weight",
    "reduce_fused",
    "top2_sum_gate",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
    "topk_weights",
]
