"""`fused_weight` at its second import path."""

from tile_kernels.engram.weights import fused_weight

__all__ = ["fused_weight"]
