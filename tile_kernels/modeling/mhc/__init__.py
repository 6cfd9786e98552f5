"""mHC in training: residual streams around any sublayer."""

from tile_kernels.modeling.mhc.functional import (
    CarriedResidual,
    expand_from_embedding,
    mhc_head,
    mhc_post,
    mhc_pre,
)
from tile_kernels.modeling.mhc.module import HyperConnection, HyperHead
from tile_kernels.modeling.mhc.recompute import RecomputedStack

__all__ = [
    "CarriedResidual",
    "HyperConnection",
    "HyperHead",
    "RecomputedStack",
    "expand_from_embedding",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
]
