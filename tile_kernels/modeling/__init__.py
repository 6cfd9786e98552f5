"""Trainable pieces on top of the operators: autograd functions and modules."""

from tile_kernels.modeling import engram, mhc, moe, quant

__all__ = ["engram", "mhc", "moe", "quant"]
