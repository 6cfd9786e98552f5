"""Trainable pieces on top of the operators: autograd functions and modules."""

from tile_kernels.modeling import engram, quant

__all__ = ["engram", "quant"]
