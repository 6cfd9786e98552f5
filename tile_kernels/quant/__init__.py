"""Quantisation: FP8, FP4 and E5M6 with block scales, alone and fused with SwiGLU."""

from tile_kernels.quant.tokens import (
    per_token_cast,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)

__all__ = ["per_token_cast", "per_token_cast_with_precomputed_sf", "per_token_cast_with_sf_only"]
