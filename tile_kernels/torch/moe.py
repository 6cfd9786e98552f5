"""References of the routing operators at their import path in TileKernels."""

from tile_kernels.moe.count.reference import group_count
from tile_kernels.moe.fi.reference import aux_fi
from tile_kernels.moe.indices.reference import inplace_unique_group_indices, mask_indices_by_tp
from tile_kernels.moe.weight.reference import normalize_weight

__all__ = [
    "aux_fi",
    "group_count",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "normalize_weight",
]
