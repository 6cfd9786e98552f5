"""`fused_weight` at its second import path."""

from tile_kernels.engram.weight.op import fused_weight

__all__ = ["fused_weight"]
