"""`expand_to_fused` and `expand_to_fused_with_sf` at their import path in TileKernels."""

from tile_kernels.moe.expand.reference import expand_to_fused, expand_to_fused_with_sf

__all__ = ["expand_to_fused", "expand_to_fused_with_sf"]
