"""Expert gating and token routing."""

from tile_kernels.moe.counting import aux_fi, group_count
from tile_kernels.moe.gating import topk_gate, topk_sum_and_topk_group_idx
from tile_kernels.moe.indices import inplace_unique_group_indices, mask_indices_by_tp
from tile_kernels.moe.weights import normalize_weight

__all__ = [
    "aux_fi",
    "group_count",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "normalize_weight",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
]
