"""Trainable pieces on top of the operators: autograd functions and modules."""

from tile_kernels.modeling import attention, engram, mhc, moe, norm, quant

__all__ = ["attention", "engram", "mhc", "moe", "norm", "quant"]
