"""`reduce_fused` at its import path in TileKernels."""

from tile_kernels.moe.reduce.reference import reduce_fused

__all__ = ["reduce_fused"]
