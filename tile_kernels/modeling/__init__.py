"""Trainable pieces on top of the operators: autograd functions and modules."""

from tile_kernels.modeling import quant

__all__ = ["quant"]
