"""`cast` and `cast_back` at their import path in TileKernels."""

from tile_kernels.quant.casting import cast, cast_back

__all__ = ["cast", "cast_back"]
