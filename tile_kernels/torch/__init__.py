"""The PyTorch oracles: plain, readable, the definition of right. They run on any device."""

from tile_kernels.torch.moe import (
    aux_fi,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
    normalize_weight,
)
from tile_kernels.torch.topk import stable_topk, topk_sum_and_topk_group_idx
from tile_kernels.torch.transpose import batched_transpose, transpose

__all__ = [
    "aux_fi",
    "batched_transpose",
    "group_count",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "normalize_weight",
    "stable_topk",
    "topk_sum_and_topk_group_idx",
    "transpose",
]
